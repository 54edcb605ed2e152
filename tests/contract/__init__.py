"""Contracts that every implementation and every wrapper keeps."""

import pytest

pytest.register_assert_rewrite("tests.contract.store_contract")

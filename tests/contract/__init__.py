"""Contracts that every implementation and every wrapper keeps."""

import pytest

for _name in ("store_contract", "swap_contract", "codec_contract"):
    pytest.register_assert_rewrite(f"tests.contract.{_name}")

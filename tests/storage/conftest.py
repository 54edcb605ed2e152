"""What the tests of stores share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.fake_kvikio import FakeKvikio, fake_kvikio


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKvikio]:
    with fake_kvikio(monkeypatch) as fake:
        yield fake

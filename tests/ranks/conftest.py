"""One crew for all tests of several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.crew import Crew


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Up to eight processes."""
    crew = Crew(8)
    yield crew
    crew.close()

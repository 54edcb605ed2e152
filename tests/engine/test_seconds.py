"""Arguments that are seconds are refused where they are none, by name and before anybody is waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidegate.dcp import TidegateReader, TidegateWriter
from tidegate.errors import ConfigError


@pytest.mark.parametrize("value", [0, -1.0, "a", None, True, float("nan")])
@pytest.mark.parametrize("name", ["rank_deadline_s", "rank_silence_s"])
def test_a_writers_seconds(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*; give a positive number of seconds$"):
        TidegateWriter(tmp_path, **{name: value})


@pytest.mark.parametrize("value", [-1.0, "a", None, True, float("nan")])
def test_a_readers_seconds(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"share_timeout_s is .*; give a positive number of seconds, or 0$"):
        TidegateReader(tmp_path, share_timeout_s=value)


def test_a_reader_may_share_nothing(tmp_path: Path) -> None:
    TidegateReader(tmp_path, share_timeout_s=0)

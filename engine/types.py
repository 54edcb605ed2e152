"""Types that several modules share."""

from __future__ import annotations

from typing import TypeAlias, Union

JSON: TypeAlias = Union[bool, int, float, str, "list[JSON]", "dict[str, JSON]", None]
"""What `json.loads` returns."""

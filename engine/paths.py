"""Where something stands in a state: steps such as `.layers`, `.0` and `["x.y"]`, and an error that collects them."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable

from .types import JSON

_MAX_KEY_DEPTH = 8


class PathError(Exception):
    """Something in a state, or in a skeleton, is not acceptable. Each level adds its step while the walk unwinds.

    Args:
        reason: What is wrong and what to do, without the place.
        is_damage: When reading: whether the checkpoint is damaged, rather than this machine unable to take it.
    """

    def __init__(self, reason: str, *, is_damage: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_damage = is_damage
        self._steps: list[str] = []

    def inside(self, step: str) -> None:
        """Say that the level above reached this one by `step`."""
        self._steps.append(step)

    @property
    def path(self) -> str:
        """The place, such as `model.layers.0.weight`."""
        return join_steps(reversed(self._steps))


def join_steps(steps: Iterable[str]) -> str:
    """Write a path. The root is `state`; it is left out before a name."""
    path = "".join(steps)
    return path[1:] if path.startswith(".") else "state" + path


def shown(value: object) -> str:
    """Show a value in a message, in a few words however large it is."""
    return reprlib.repr(value)


def step_of_key(node: JSON) -> str:
    """Return the step to the value under a key, given the key as the skeleton writes it."""
    return f".{node}" if isinstance(node, str) and node.isidentifier() else f"[{_key_text(node)}]"


def step_of_live_key(key: object) -> str:
    """Return the step to the value under a key that is not, or cannot be, written down."""
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r:.80}]"


def _key_text(node: JSON, depth: int = 0) -> str:
    if depth > _MAX_KEY_DEPTH:
        return "…"
    if isinstance(node, str):
        return json.dumps(node, ensure_ascii=not node.isprintable())
    if isinstance(node, list) and node and node[0] == "tuple":
        items = ", ".join(_key_text(item, depth + 1) for item in node[1:])
        return f"({items},)" if len(node) == 2 else f"({items})"
    if isinstance(node, list) and len(node) == 3 and node[0] == "enum":
        return f"{node[1]}.{node[2]}"
    if isinstance(node, list):
        return "[" + ", ".join(_key_text(item, depth + 1) for item in node) + "]"
    return "{…}" if isinstance(node, dict) else repr(node)

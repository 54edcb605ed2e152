"""The `derived` key of a manifest (storage/FORMAT.md)."""

from __future__ import annotations

from collections.abc import Sequence

from .derived import Derivation
from .errors import CorruptCheckpointError
from .paths import shown
from .plan import Chunk
from .rules import RULES, Rule
from .table import StateTable
from .types import JSON

DERIVED = "derived"
"""The feature of a manifest that has the key of this name."""


def derived_to_json(derived: Sequence[Derivation]) -> JSON:
    """Write what follows from what: one item a rule."""
    by_rule: dict[str, list[JSON]] = {}
    for item in derived:
        by_rule.setdefault(item.rule.name, []).append([item.chunk, *item.sources])
    return [{"rule": name, "version": RULES[name].version, "chunks": rows} for name, rows in by_rule.items()]


def derived_from_json(items: JSON, table: StateTable, chunks: Sequence[Chunk]) -> tuple[Derivation, ...]:
    """Read and check it.

    Args:
        items: The value of the key.
        table: The manifest's.
        chunks: The manifest's.

    Raises:
        CorruptCheckpointError: It is malformed, a rule does not fit the extents, or a source has no frames itself.
    """
    found: dict[int, Derivation] = {}
    for item in _list(items):
        fields = item if isinstance(item, dict) else {}
        rule = RULES.get(str(fields.get("rule")))
        if rule is None or fields.get("version") != rule.version or type(fields.get("version")) is not int:
            raise _damaged(f"this build knows no rule {shown(item)}; install the tidegate that wrote it")
        for row in _list(fields.get("chunks")):
            derivation = _derivation(row, rule, table, chunks)
            if derivation.chunk in found:
                raise _damaged(f"chunk {derivation.chunk} is derived twice")
            found[derivation.chunk] = derivation
    _check_sources(found, chunks)
    return tuple(found[index] for index in sorted(found))


def _derivation(row: JSON, rule: Rule, table: StateTable, chunks: Sequence[Chunk]) -> Derivation:
    numbers = [number for number in _list(row) if type(number) is int and number >= 0]
    if not numbers or len(numbers) != len(_list(row)) or numbers[0] >= len(chunks):
        raise _damaged(f"{shown(row)} names no chunk and its sources")
    index, *sources = numbers
    chunk = chunks[index]
    if len(sources) != chunk.end_extent - chunk.first_extent:
        raise _damaged(f"chunk {index} has {chunk.end_extent - chunk.first_extent} extents and {len(sources)} sources")
    for extent, source in enumerate(sources, chunk.first_extent):
        if source >= len(table.extent_bytes) or not rule.fits(table.extent_words[extent], table.extent_words[source]):
            raise _damaged(f"extent {extent} cannot follow from extent {source} by rule {rule.name}")
        if table.extent_bytes[source] != table.extent_bytes[extent] * rule.ratio:
            raise _damaged(f"extents {extent} and {source} are not as long as rule {rule.name} wants")
    return Derivation(index, rule, tuple(sources))


def _check_sources(found: dict[int, Derivation], chunks: Sequence[Chunk]) -> None:
    targets = {extent for index in found for extent in chunks[index].extents}
    for derivation in found.values():
        for source in derivation.sources:
            if source in targets:
                raise _damaged(f"chunk {derivation.chunk} follows from extent {source}, which is not stored itself")


def _list(value: JSON) -> list[JSON]:
    if not isinstance(value, list):
        raise _damaged(f"expected a list, got {shown(value)}")
    return value


def _damaged(why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"what the manifest derives is damaged: {why}", stage="open")

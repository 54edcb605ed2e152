"""Chunks that need not be stored, because another extent of the same state gives their bytes by a rule (rules.py).

Which chunks may be such is planned; whether they are is found out at every save, for what was staged. On a GPU one
kernel compares the caller's tensors at the call (derived_device.py). On the CPU the threads that encode do it: the one
that has a source hashes what the rule makes of it, the one that has the target hashes that, and a chunk whose hashes
agree is dropped. So the training thread pays nothing.
"""

from __future__ import annotations

import bisect
import itertools
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .plan import Chunk
from .rules import Rule, digest_of, digests_of_targets

_BATCH_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class Pair:
    """A source extent, and the rule by which it may give the bytes of another."""

    rule: Rule
    source: int


@dataclass(frozen=True, slots=True)
class Derivation:
    """A chunk that is not stored: each of its extents follows from a source, by one rule.

    Attributes:
        chunk: Its number.
        rule: The rule.
        sources: The source of each of its extents; of a piece, that of the whole extent.
    """

    chunk: int
    rule: Rule
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes [target_at, target_at + num_bytes) of one chunk that may follow from those at source_at of another."""

    target: int
    source: int
    rule: Rule
    target_at: int
    source_at: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may be derived in the saves of one plan.

    Attributes:
        derivations: By chunk.
        by_target: The links of each of these chunks.
        by_source: The links by the chunk that has the source.
    """

    derivations: Mapping[int, Derivation] = field(default_factory=dict)
    by_target: Mapping[int, Sequence[Link]] = field(default_factory=dict)
    by_source: Mapping[int, Sequence[Link]] = field(default_factory=dict)


def find_candidates(chunks: Sequence[Chunk], extent_bytes: Sequence[int], pairs: Mapping[int, Pair]) -> Candidates:
    """Find the chunks all of whose extents have a source, and where in which chunks that lies.

    Args:
        chunks: The plan's; no chunk mixes rules.
        extent_bytes: Length, by extent.
        pairs: By target extent. No source is a target.
    """
    places = _Places(chunks, extent_bytes)
    derivations: dict[int, Derivation] = {}
    by_target: dict[int, list[Link]] = {}
    by_source: dict[int, list[Link]] = {}
    for chunk in chunks:
        found = [pairs.get(extent) for extent in chunk.extents]
        known = [pair for pair in found if pair is not None]
        if len(known) != len(found):
            continue
        derivations[chunk.index] = Derivation(chunk.index, known[0].rule, tuple(pair.source for pair in known))
        by_target[chunk.index] = list(places.links(chunk, known))
        for link in by_target[chunk.index]:
            by_source.setdefault(link.source, []).append(link)
    return Candidates(derivations, by_target, by_source)


class _Places:
    """Where the bytes of an extent lie in chunks."""

    def __init__(self, chunks: Sequence[Chunk], extent_bytes: Sequence[int]) -> None:
        self._extent_bytes = extent_bytes
        self._starts = list(itertools.accumulate(extent_bytes, initial=0))
        self._chunks = chunks
        self._firsts = [(chunk.first_extent, chunk.offset) for chunk in chunks]

    def links(self, chunk: Chunk, pairs: Sequence[Pair]) -> Iterator[Link]:
        at = 0
        for extent, pair in enumerate(pairs, chunk.first_extent):
            start, num_bytes = chunk.span(extent, self._extent_bytes)
            ratio = pair.rule.ratio
            for source, source_at, begin, end in self._spans(pair.source, start * ratio, (start + num_bytes) * ratio):
                target_at = at + begin // ratio - start
                yield Link(chunk.index, source, pair.rule, target_at, source_at, (end - begin) // ratio)
            at += num_bytes

    def _spans(self, extent: int, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the chunks that hold bytes [begin, end) of an extent: number, where in it, and which of the bytes."""
        index = bisect.bisect_right(self._firsts, (extent, begin)) - 1
        while begin < end:
            chunk = self._chunks[index]
            before = self._starts[extent] - self._starts[chunk.first_extent]
            stop = min(end, chunk.offset + chunk.num_bytes if chunk.is_piece else self._extent_bytes[extent])
            yield index, begin - chunk.offset if chunk.is_piece else before + begin, begin, stop
            begin, index = stop, index + 1


def _batches(links: Sequence[Link]) -> Iterator[list[Link]]:
    """Part links into runs of neighbours in the source, of one rule and not long: small tensors are done together."""
    batch: list[Link] = []
    num_bytes = 0
    for link in links:
        is_next = bool(batch) and (
            batch[-1].rule is link.rule
            and batch[-1].source_at + batch[-1].num_bytes * link.rule.ratio == link.source_at
            and num_bytes + link.num_bytes <= _BATCH_BYTES
        )
        if batch and not is_next:
            yield batch
            batch, num_bytes = [], 0
        batch.append(link)
        num_bytes += link.num_bytes
    if batch:
        yield batch


class DerivedChunks:
    """Finds out, in one save, which candidates follow from their sources.

    Args:
        candidates: The plan's.
    """

    def __init__(self, candidates: Candidates | None = None) -> None:
        self.candidates = candidates or Candidates()
        self._seed = secrets.randbits(64)
        self._lock = threading.Lock()
        self._found: dict[int, Derivation] = {}
        self._started: set[int] = set()
        self._offers: dict[Link, bytes | None] = {}
        self._changed = threading.Condition()  # one for all: an event for each source would take the call too long
        self._let_go: set[int] = set()
        self._compared: dict[int, bool] = {}
        self._waits: list[Callable[[], Mapping[int, bool]]] = []

    def found(self) -> tuple[Derivation, ...]:
        """Return what was found, by chunk."""
        return tuple(self._found[index] for index in sorted(self._found))

    def missed(self) -> frozenset[int]:
        """Return the candidates whose turn has come and that had to be stored."""
        return frozenset((self.candidates.derivations.keys() & self._started) - self._found.keys())

    def expect(self, wait: Callable[[], Mapping[int, bool]]) -> None:
        """Take in a comparison that a GPU was asked for: `wait` blocks for it, and says which chunks follow."""
        self._waits.append(wait)

    def start(self, index: int) -> bool:
        """Say that a chunk's turn to be encoded has come; return whether it is known that it need not be.

        Blocks for the comparison by a GPU, if it is a candidate.
        """
        self._started.add(index)
        if index not in self.candidates.derivations:
            return False
        while self._waits:
            self._compared.update(self._waits.pop(0)())
        return self._compared.get(index, False) and self._note(index)

    def offer(self, index: int, raw: torch.Tensor) -> None:
        """Hash, for the candidates that need it, what the rules make of a chunk.

        Args:
            index: The chunk.
            raw: Its bytes, uint8[num_bytes] on the CPU.
        """
        try:
            links = [link for link in self.candidates.by_source.get(index, ()) if link.target not in self._compared]
            for batch in _batches(links):
                first, last = batch[0], batch[-1]
                source = raw[first.source_at : last.source_at + last.num_bytes * last.rule.ratio]
                digests = digests_of_targets(first.rule, source, [link.num_bytes for link in batch], self._seed)
                self._offers.update(zip(batch, digests, strict=True))
        finally:
            self.let_go(index)

    def let_go(self, index: int) -> None:
        """Let nobody wait for what this chunk's bytes would say."""
        if index in self.candidates.by_source:
            with self._changed:
                self._let_go.add(index)
                self._changed.notify_all()

    def follows(self, index: int, raw: torch.Tensor) -> bool:
        """Tell whether a chunk follows from its sources. Blocks until they are hashed, by threads that have begun.

        Args:
            index: The chunk.
            raw: Its bytes, uint8[num_bytes] on the CPU.
        """
        if index not in self.candidates.derivations or index in self._compared:
            return False
        links = self.candidates.by_target[index]
        if any(link.source not in self._started for link in links):
            return False
        for link in links:
            self._await(link.source)
            offered = self._offers.get(link)
            if offered is None:
                return False
            if offered != digest_of(raw[link.target_at : link.target_at + link.num_bytes], self._seed):
                return False
        return self._note(index)

    def _await(self, source: int) -> None:
        with self._changed:
            while source not in self._let_go:
                self._changed.wait()

    def _note(self, index: int) -> bool:
        with self._lock:
            self._found[index] = self.candidates.derivations[index]
        return True

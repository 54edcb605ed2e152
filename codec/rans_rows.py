"""The rans coder in NumPy: all lanes of many segments advance together, step by step. RANS.md gives the steps.

A row is a segment. The rows of a batch are sorted by their number of steps, most first, so that those still active
are always the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .rans_segments import Segment, missing_steps
from .rans_tables import NUM_SYMBOLS, CodeTables
from .rans_units import NUM_LANES

LOWEST_STATE = 1 << 16

Octets = NDArray[np.uint8]

_NO_SYMBOL = NUM_SYMBOLS
"""What a lane without a unit codes: its frequency is the whole sum, so that neither state nor words change."""


def count_symbols(symbols: Octets, groups: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    """Add up symbols by group: see `rans_survey.Count`."""
    step = max(1, (1 << 16) // max(1, symbols.shape[1]))
    for begin in range(0, len(symbols), step):
        own = groups[begin : begin + step]
        first, last = own[0], own[-1]
        places = symbols[begin : begin + step] + NUM_SYMBOLS * (own - first)[:, None]
        found = np.bincount(places.reshape(-1), minlength=NUM_SYMBOLS * int(last - first + 1))
        counts[first : last + 1] += found.reshape(-1, NUM_SYMBOLS)


class RowEncoder:
    """Codes batches of segments with the tables of one body.

    Args:
        tables: The tables.
    """

    def __init__(self, tables: CodeTables) -> None:
        total_sum = np.uint32(1 << tables.log2_sum)
        frequencies = _with_no_symbol(tables.frequencies, total_sum)
        self._log2_sum = tables.log2_sum
        self._frequencies = frequencies.reshape(-1)
        self._starts = _with_no_symbol(tables.starts, np.uint32(0)).reshape(-1)
        self._rests = total_sum - self._frequencies
        self._reciprocals = 1.0 / np.maximum(self._frequencies, 1)

    def encode(
        self, rows: Sequence[Segment], symbols: Sequence[Octets], carried: Sequence[Octets], tables: Sequence[int]
    ) -> tuple[NDArray[np.uint32], list[NDArray[np.uint16]]]:
        """Code segments.

        Args:
            rows: The segments, those of most steps first.
            symbols: uint8[num_coded * units_per_tile] of each, in the order of the units.
            carried: uint8[64] of each; empty where units are bytes.
            tables: The table of each, wide ones counted; it has a frequency for each symbol of the segment.

        Returns:
            uint32[rows, 32], the states; and the words of each segment.
        """
        places = np.empty((rows[0].num_steps, len(rows), NUM_LANES), dtype=np.uint16)
        states = np.full((len(rows), NUM_LANES), LOWEST_STATE, dtype=np.uint32)
        for row, (segment, own, octets, table) in enumerate(zip(rows, symbols, carried, tables, strict=True)):
            places[: segment.num_steps, row] = self._places(segment, own, table)
            if octets.size:
                states[row] += octets.view("<u2")
        words = np.empty(places.shape, dtype=np.uint16)
        emitted = np.empty(places.shape, dtype=bool)
        for step, active in enumerate(_active_rows(rows)):
            self._step(states[:active], places[step, :active], words[step, :active], emitted[step, :active])
        steps = [segment.num_steps for segment in rows]
        return states, [words[:end, row][emitted[:end, row]] for row, end in enumerate(steps)]

    def _places(self, segment: Segment, symbols: Octets, table: int) -> NDArray[np.uint16]:
        places = np.uint16((NUM_SYMBOLS + 1) * table) + _to_steps(symbols, segment).astype(np.uint16)
        missing = missing_steps(segment)
        places[len(places) - len(missing) :][missing] = (NUM_SYMBOLS + 1) * table + _NO_SYMBOL
        return places

    def _step(
        self, x: NDArray[np.uint32], places: NDArray[np.uint16], words: NDArray[np.uint16], emitted: NDArray[np.bool_]
    ) -> None:
        n = np.uint32(self._log2_sum)
        np.greater_equal(x >> (np.uint32(32) - n), self._frequencies.take(places, mode="clip"), out=emitted)
        np.copyto(words, x, casting="unsafe")
        np.right_shift(x, emitted.view(np.uint8) << np.uint8(4), out=x)
        # The half keeps an exact quotient from being rounded down; the nearest other one is 2**-14 away.
        quotients = ((x + 0.5) * self._reciprocals.take(places, mode="clip")).astype(np.uint32)
        quotients *= self._rests.take(places, mode="clip")
        x += quotients
        x += self._starts.take(places, mode="clip")


@dataclass(slots=True, eq=False)
class DecodedRows:
    """What a batch of segments decodes to.

    Attributes:
        symbols: uint8[num_coded * units_per_tile] of each segment, in the order of the units.
        states: uint32[rows, 32], the last states.
        words_left: int64[rows], words that were not taken; negative if there were too few.
    """

    symbols: list[Octets]
    states: NDArray[np.uint32]
    words_left: NDArray[np.int64]


class RowDecoder:
    """Decodes batches of segments with the tables of one body.

    Args:
        tables: The tables.
    """

    def __init__(self, tables: CodeTables) -> None:
        self._log2_sum = tables.log2_sum
        slots = np.arange(1 << tables.log2_sum, dtype=np.uint32)
        self._symbols = tables.symbols()
        self._frequencies = np.take_along_axis(tables.frequencies, self._symbols.astype(np.intp), axis=1).reshape(-1)
        starts = np.take_along_axis(tables.starts, self._symbols.astype(np.intp), axis=1)
        self._biases = (slots - starts).reshape(-1)
        self._symbols = self._symbols.reshape(-1)

    def decode(
        self,
        rows: Sequence[Segment],
        states: NDArray[np.uint32],
        words: Sequence[NDArray[np.uint16]],
        tables: Sequence[int],
    ) -> DecodedRows:
        """Decode segments. Whatever the bytes are, this reads only words that are there.

        Args:
            rows: The segments, those of most steps first.
            states: uint32[rows, 32], the states of each; changed in place.
            words: The words of each.
            tables: The table of each, wide ones counted.
        """
        lengths = np.array([own.size for own in words], dtype=np.int64)
        # One word in front, so that there is one to read where a segment has too few.
        together = np.concatenate([np.zeros(1, dtype=np.uint16), *words])
        first = 1 + np.cumsum(lengths) - lengths
        left = lengths.copy()
        offsets = np.array(tables, dtype=np.uint32)[:, None] << np.uint32(self._log2_sum)
        symbols = np.empty((rows[0].num_steps, len(rows), NUM_LANES), dtype=np.uint8)
        active = _active_rows(rows)
        missing = _missing_rows(rows)
        for step in range(len(active) - 1, -1, -1):
            end = active[step]
            idle = missing.get(step)
            kept = states[idle[0]].copy() if idle is not None else None
            need = self._step(states[:end], offsets[:end], symbols[step, :end])
            if idle is not None and kept is not None:
                row, lanes = idle
                states[row, lanes] = kept[lanes]
                need[row, lanes] = False
            _take_words(states[:end], need, left[:end], first[:end], together)
        natural = [_to_units(symbols[: segment.num_steps, row], segment) for row, segment in enumerate(rows)]
        return DecodedRows(natural, states, left)

    def _step(self, x: NDArray[np.uint32], offsets: NDArray[np.uint32], symbols: Octets) -> NDArray[np.bool_]:
        places = (x & np.uint32((1 << self._log2_sum) - 1)) + offsets
        self._symbols.take(places, out=symbols, mode="clip")
        np.right_shift(x, np.uint32(self._log2_sum), out=x)
        np.multiply(x, self._frequencies.take(places, mode="clip"), out=x)
        np.add(x, self._biases.take(places, mode="clip"), out=x)
        need: NDArray[np.bool_] = x < LOWEST_STATE
        return need


def _take_words(
    x: NDArray[np.uint32],
    need: NDArray[np.bool_],
    left: NDArray[np.int64],
    first: NDArray[np.int64],
    words: NDArray[np.uint16],
) -> None:
    takers = np.flatnonzero(need)
    if not takers.size:
        return
    counts = np.count_nonzero(need, axis=1)
    left -= counts
    # Where a segment has too few words the caller finds "left" negative; until then it reads any.
    places = np.repeat(first + left - (np.cumsum(counts) - counts), counts) + np.arange(takers.size)
    flat = x.reshape(-1)
    flat[takers] = (flat[takers] << np.uint32(16)) | words.take(places, mode="clip")


def _active_rows(rows: Sequence[Segment]) -> list[int]:
    """Return how many rows take part in each step."""
    steps = np.array([segment.num_steps for segment in rows])
    active: list[int] = np.searchsorted(-steps, -np.arange(int(steps[0])), side="left").tolist()
    return active


def _missing_rows(rows: Sequence[Segment]) -> dict[int, tuple[int, NDArray[np.bool_]]]:
    """Return, by step, the row some of whose lanes have no unit then, and these lanes. One row at most has any."""
    found = {}
    for row, segment in enumerate(rows):
        for step, lanes in enumerate(missing_steps(segment), segment.num_steps - segment.shape.units_per_lane):
            found[step] = (row, lanes)
    return found


def _to_steps(symbols: Octets, segment: Segment) -> Octets:
    by_lane = symbols.reshape(segment.num_coded, NUM_LANES, segment.shape.units_per_lane)
    return by_lane.transpose(0, 2, 1).reshape(-1, NUM_LANES)


def _to_units(symbols: Octets, segment: Segment) -> Octets:
    by_step = symbols.reshape(segment.num_coded, segment.shape.units_per_lane, NUM_LANES)
    return by_step.transpose(0, 2, 1).reshape(-1)


def _with_no_symbol(table: NDArray[np.uint32], value: np.uint32) -> NDArray[np.uint32]:
    return np.concatenate([table, np.full((len(table), 1), value, dtype=np.uint32)], axis=1)

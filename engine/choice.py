"""Choose the codec of each chunk from measured ratios and speeds, so that max(encode, write) is least.

Chunks of one device, word type and role (weights, first moments, …) are alike: they form a *group*. What each codec
makes of a group is measured on one of its chunks, now and then again; how fast the store is, on the frames that it
takes. `assign` then starts every chunk with the codec that takes the least time and moves chunks to codecs that make
them smaller as long as that shortens the save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Group = tuple[str, str, str]
"""Device, word type and role."""

FIRST_GUESS_BYTES_PER_S = 3e9
"""What a store is taken to write before it has been measured: a local disk."""

WORTH_BINDING = 0.03
"""The part of a save that codecs which decode on some machines only must save, else none of them is chosen."""

_SAVES_BETWEEN_TRIALS = 16
_SMOOTHING = 0.5
_LIKE = 0.1
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Trial:
    """What one codec made of one chunk of a group."""

    bytes_per_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Option:
    """One codec for one chunk: seconds to encode it, and the bytes that it then takes."""

    codec: str
    encode_s: float
    stored_bytes: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What a choice was made from: how many trials had been learnt, and the speed of the store."""

    num_learned: int
    store_bytes_per_s: float

    def is_like(self, other: Figures) -> bool:
        """Whether a choice made from these holds for the others: the same trials, and a store of about that speed."""
        same = self.num_learned == other.num_learned
        return same and abs(self.store_bytes_per_s - other.store_bytes_per_s) <= _LIKE * self.store_bytes_per_s


def assign(chunks: Sequence[Sequence[Option]], store_bytes_per_s: float) -> list[str]:
    """Choose an option for each chunk so that max(sum of encode_s, sum of stored_bytes / store speed) is least.

    Greedy: all begin with what is fastest to encode; then the steps to smaller options are taken in the order of bytes
    saved by second of encoding, each if the maximum does not grow. What is left from the optimum is less than the time
    of one chunk. Where the store is the slower stage, every chunk ends with its smallest option.

    Args:
        chunks: The options of each chunk; at least one.
        store_bytes_per_s: What the store writes.

    Returns:
        Names of codecs, by chunk.
    """
    hulls = [_hull(options) for options in chunks]
    at = [0] * len(hulls)
    encode_s = sum(hull[0].encode_s for hull in hulls)
    write_s = sum(hull[0].stored_bytes for hull in hulls) / store_bytes_per_s
    steps = []
    for i, hull in enumerate(hulls):
        for k, (before, after) in enumerate(pairwise(hull)):
            gain = (before.stored_bytes - after.stored_bytes) / max(after.encode_s - before.encode_s, 1e-12)
            # Equal chunks are spread evenly over the save, so that both stages stay busy from its start to its end.
            steps.append((-gain, k, i * _GOLDEN % 1.0, i))
    for _, k, _, i in sorted(steps):
        if at[i] != k:
            continue  # the step before it was not taken
        more_s = hulls[i][k + 1].encode_s - hulls[i][k].encode_s
        less_s = (hulls[i][k].stored_bytes - hulls[i][k + 1].stored_bytes) / store_bytes_per_s
        if max(encode_s + more_s, write_s - less_s) <= max(encode_s, write_s):
            at[i] += 1
            encode_s += more_s
            write_s -= less_s
    return [hull[k].codec for hull, k in zip(hulls, at, strict=True)]


def _save_s(chunks: Sequence[Sequence[Option]], codecs: Sequence[str], store_bytes_per_s: float) -> float:
    """Return what `assign` makes least, for a choice of codecs by chunk."""
    chosen = [
        next(option for option in options if option.codec == codec)
        for options, codec in zip(chunks, codecs, strict=True)
    ]
    encode_s = sum(option.encode_s for option in chosen)
    return max(encode_s, sum(option.stored_bytes for option in chosen) / store_bytes_per_s)


def _hull(options: Sequence[Option]) -> list[Option]:
    """The options worth having, fastest first: each saves more bytes by second than the step after it."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.encode_s, o.stored_bytes)):
        if hull and option.stored_bytes >= hull[-1].stored_bytes:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(before: Option, after: Option) -> float:
    return (before.stored_bytes - after.stored_bytes) / max(after.encode_s - before.encode_s, 1e-12)


@dataclass(slots=True)
class CodecChooser:
    """What has been measured, and the choice that follows from it. Used by one thread at a time.

    Args:
        candidates: Names of codecs that every group may use.
        store_bytes_per_s: What the store writes, if that is known.
        bound: Those of them whose frames decode on some machines only.
    """

    candidates: tuple[str, ...]
    store_bytes_per_s: float | None = None
    bound: frozenset[str] = frozenset()
    _trials: dict[Group, dict[str, Trial]] = field(default_factory=dict)
    _age: dict[Group, int] = field(default_factory=dict)
    _num_learned: int = 0

    @property
    def figures(self) -> Figures:
        """What a choice depends on, beside the chunks."""
        return Figures(self._num_learned, self.store_bytes_per_s or FIRST_GUESS_BYTES_PER_S)

    def knows(self, group: Group) -> bool:
        """Whether the candidates have been tried on a group."""
        return group in self._trials

    def needs_trial(self, group: Group, *, again: bool = True) -> bool:
        """Whether every candidate should be tried on the next chunk of a group.

        Args:
            group: The group.
            again: Whether one that has been tried, long ago, may be tried again: not two of them in one save.
        """
        if len(self.candidates) < 2:
            return False
        return group not in self._trials or (again and self._age[group] >= _SAVES_BETWEEN_TRIALS)

    def learn(self, group: Group, trials: Mapping[str, Trial]) -> None:
        """Take in what the candidates made of one chunk of a group."""
        self._trials[group] = dict(trials)
        self._age[group] = 0
        self._num_learned += 1

    def learn_store(self, num_bytes: int, busy_s: float) -> None:
        """Take in that the store took `num_bytes` in `busy_s` seconds."""
        if num_bytes <= 0 or busy_s <= 0:
            return
        now = num_bytes / busy_s
        old = self.store_bytes_per_s
        self.store_bytes_per_s = now if old is None else old + _SMOOTHING * (now - old)

    def end_save(self) -> None:
        """Count one more save since the last trials."""
        for group in self._age:
            self._age[group] += 1

    def choose(self, chunks: Sequence[tuple[Group, int]]) -> list[str]:
        """Choose a codec for each chunk, given as its group and its bytes. A group without trials gets the first.

        One chunk binds the whole checkpoint to the machines that decode it, so a bound codec is used where the save
        gains by it, and not at all where all of them together shorten it by less than WORTH_BINDING.
        """
        if len(self.candidates) == 1:
            return list(self.candidates) * len(chunks)
        options = [self._options(group, num_bytes) for group, num_bytes in chunks]
        rate = self.store_bytes_per_s or FIRST_GUESS_BYTES_PER_S
        best = assign(options, rate)
        if self.bound.isdisjoint(best):
            return best
        free = [[option for option in of_chunk if option.codec not in self.bound] for of_chunk in options]
        if not all(free):
            return best
        other = assign(free, rate)
        is_worth_it = _save_s(options, best, rate) < (1 - WORTH_BINDING) * _save_s(options, other, rate)
        return best if is_worth_it else other

    def note(self, used: Mapping[Group, Mapping[str, int]]) -> str:
        """Say what was chosen, and from which figures.

        Args:
            used: Chunks by group and codec.
        """
        rate = self.store_bytes_per_s or FIRST_GUESS_BYTES_PER_S
        parts = []
        for group, counts in used.items():
            name = " ".join(part for part in group if part)
            found = self._trials.get(group, {})
            figures = [
                f"{codec} {trial.ratio:.3f} at {trial.bytes_per_s / 1e9:.3g} GB/s" for codec, trial in found.items()
            ]
            chosen = " + ".join(f"{codec} × {count}" for codec, count in counts.items())
            parts.append(f"{name}: {chosen} ({', '.join(figures) or 'not tried'})")
        return f"auto, for a store of {rate / 1e9:.3g} GB/s: " + "; ".join(parts)

    def _options(self, group: Group, num_bytes: int) -> list[Option]:
        trials = self._trials.get(group)
        if trials is None:
            return [Option(self.candidates[0], 0.0, num_bytes)]
        return [Option(codec, num_bytes / t.bytes_per_s, num_bytes / t.ratio) for codec, t in trials.items()]

"""The engine's options, checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tidegate.codec.base import frame_bound_bytes
from tidegate.codec.errors import UnknownCodecError
from tidegate.codec.registry import codec_named, codec_names, needs_gpu

from .chunk_sizes import HOST_CHUNK_BYTES, ChunkSizes
from .delta import DeltaPolicy
from .errors import ConfigError
from .pairs import DeriveOption
from .plan import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from .retention import KeepBest, KeepPolicy
from .snapshot import SNAPSHOT_MODES, SnapshotMode

Verify = Literal["checksum", "decode"]
OnBusy = Literal["wait", "skip", "error"]
_CHUNK_STEP_BYTES = 64 << 10
_NUM_QUEUED_WRITES = 3
_NUM_STAGED = 2
NUM_DEVICE_OUTPUTS = 3
"""Frames of CUDA chunks in host memory: one that is copied there, one that is written, and one in between."""
_DELTA_BUFFERS = 3
_KEPT_SHARE = 4


@dataclass(frozen=True, slots=True)
class Options:
    """What `CheckpointEngine` was asked for; see there for what each means."""

    codec: str = "auto"
    snapshot: SnapshotMode = "auto"
    chunk_bytes: int | None = None
    device_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    watermarks: tuple[float, float] = (0.9, 0.7)
    verify: Verify = "checksum"
    on_busy: OnBusy = "wait"
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: KeepBest | None = None
    keep_parts: Sequence[str] = ()
    keep_full_last: int | None = None
    derive: DeriveOption | None = None
    delta: DeltaPolicy | None = None

    def __post_init__(self) -> None:
        _check_codec(self.codec)
        _check_choice("snapshot", self.snapshot, SNAPSHOT_MODES)
        _check_choice("verify", self.verify, ("checksum", "decode"))
        _check_choice("on_busy", self.on_busy, ("wait", "skip", "error"))
        if self.chunk_bytes is not None:
            _check_chunk_bytes(self.chunk_bytes)
        for name in ("device_budget_bytes", "host_budget_bytes"):
            value = getattr(self, name)
            if value is not None:
                _check_count(name, value, 1)
        _ = self.keep_policy
        if not isinstance(self.derive, bool | Mapping | None):
            raise ConfigError(f"derive is {self.derive!r}; give True, False, or a mapping of paths to paths")
        if not isinstance(self.delta, DeltaPolicy | None):
            raise ConfigError(f"delta is {self.delta!r}; give a DeltaPolicy, or None")
        if self.delta is not None and self.codec != "auto" and needs_gpu(self.codec):
            raise ConfigError(
                f"delta needs a codec that decodes on every machine, and {self.codec} decodes on GPUs only; use "
                'codec="auto", "rans" or "zstd"'
            )
        high, low = self.watermarks
        if not 0.0 < low <= high <= 1.0:
            raise ConfigError(f"watermarks are {self.watermarks}; give (high, low) with 0 < low <= high <= 1")

    @property
    def keep_policy(self) -> KeepPolicy:
        """What stays after a commit. Raises ConfigError where the options do not fit together."""
        if isinstance(self.keep_parts, str):
            raise ConfigError(f"keep_parts is {self.keep_parts!r}; give a list of keys of the state, such as ['model']")
        parts = tuple(self.keep_parts)
        return KeepPolicy(self.keep_last, self.keep_every, self.keep_best, parts, self.keep_full_last)

    def check_for_ranks(self) -> None:
        """Raise ConfigError where something was asked for that ranks cannot do that save together."""
        for name, was_asked in (("derive", self.derive), ("delta", self.delta), ("keep_parts", self.keep_parts)):
            if was_asked:
                raise ConfigError(
                    f"{name} does not go with process_group: what several ranks save together is stored in full, and "
                    f"stays so; leave {name} out"
                )

    @property
    def num_encode_threads(self) -> int:
        """Threads that encode on the CPU: half the cores, so that the training keeps the rest; at least two."""
        return max(2, min(8, (os.cpu_count() or 2) // 2))


@dataclass(frozen=True, slots=True)
class HostShares:
    """How the host budget is split. Frames have a share of their own, so that staged chunks can always be encoded.

    Attributes:
        sizes: The longest chunks, made shorter where the budget would not hold enough of them.
        staging_bytes: For chunks that are copied at the call.
        output_bytes: For frames being encoded or written.
        num_outputs: How many of those there may be, however small.
        delta_bytes: For residuals, and chunks of a base that are read again; 0 where there are no deltas.
        kept_bytes: For copies of the last checkpoint's chunks.
    """

    sizes: ChunkSizes
    staging_bytes: int
    output_bytes: int
    num_outputs: int
    delta_bytes: int = 0
    kept_bytes: int = 0


def kept_device_bytes(delta: DeltaPolicy | None, room_bytes: int) -> int:
    """Return the most device memory for the bases of differences, where so much is there for them and the snapshot."""
    if delta is None or room_bytes <= 0:
        return 0
    if delta.keep_device_bytes is not None:
        return min(delta.keep_device_bytes, room_bytes)
    return room_bytes // _KEPT_SHARE


def split_host_budget(options: Options, available_bytes: int, device_bytes: int = 0) -> HostShares:
    """Divide the host budget between staging and frames.

    Chunks of CUDA tensors that it would not hold enough of become shorter first, down to those of host memory; only
    then all do.

    Args:
        options: The engine's.
        available_bytes: Host memory that can be had: half of it is the budget where the user has set none.
        device_bytes: The longest chunk of CUDA tensors where the user has not said; 0: there are none yet.
    """
    wanted_bytes = options.chunk_bytes or HOST_CHUNK_BYTES
    num_outputs = options.num_encode_threads + _NUM_QUEUED_WRITES
    num_deltas = _DELTA_BUFFERS * options.num_encode_threads if options.delta is not None else 0
    num_units = num_outputs + _NUM_STAGED + num_deltas
    budget_bytes = options.host_budget_bytes
    if budget_bytes is None:
        budget_bytes = max(available_bytes // 2, num_units * frame_bound_bytes(wanted_bytes))
    kept_bytes = _kept_bytes(options.delta, budget_bytes)
    budget_bytes -= kept_bytes if options.delta is not None and options.delta.keep_bytes is None else 0
    high = options.watermarks[0]
    largest = int(budget_bytes * high) // num_units - frame_bound_bytes(0)
    host_bytes = min(wanted_bytes, max(MIN_CHUNK_BYTES, largest // _CHUNK_STEP_BYTES * _CHUNK_STEP_BYTES))
    delta_bytes = num_deltas * frame_bound_bytes(host_bytes)
    sizes = ChunkSizes(host_bytes, host_bytes)
    if options.chunk_bytes is None and options.delta is None:  # with deltas: see Resources
        sizes = _with_room(ChunkSizes(host_bytes, max(host_bytes, device_bytes)), num_outputs, int(budget_bytes * high))
    unit_bytes = frame_bound_bytes(sizes.device_bytes)
    output_bytes = int(_outputs_bytes(sizes, num_outputs) / high) + 1
    staging_bytes = max(budget_bytes - output_bytes - delta_bytes, unit_bytes)
    return HostShares(sizes, staging_bytes, output_bytes, num_outputs, delta_bytes, kept_bytes)


def _with_room(sizes: ChunkSizes, num_outputs: int, room_bytes: int) -> ChunkSizes:
    """Halve the chunks of CUDA tensors until their buffers have room, or they are as short as those of host memory."""
    while sizes.device_bytes > sizes.host_bytes:
        staged_bytes = _NUM_STAGED * frame_bound_bytes(sizes.device_bytes)
        if _outputs_bytes(sizes, num_outputs) + staged_bytes <= room_bytes:
            break
        sizes = ChunkSizes(sizes.host_bytes, max(sizes.host_bytes, sizes.device_bytes // 2))
    return sizes


def _outputs_bytes(sizes: ChunkSizes, num_outputs: int) -> int:
    """Host memory for frames. Those of longer chunks are fewer: a GPU has few in flight, whatever the CPU's cores."""
    host_bytes = num_outputs * frame_bound_bytes(sizes.host_bytes)
    if sizes.device_bytes == sizes.host_bytes:
        return host_bytes
    return max(host_bytes, NUM_DEVICE_OUTPUTS * frame_bound_bytes(sizes.device_bytes))


def _kept_bytes(policy: DeltaPolicy | None, budget_bytes: int) -> int:
    if policy is None:
        return 0
    return budget_bytes // _KEPT_SHARE if policy.keep_bytes is None else policy.keep_bytes


def available_host_bytes() -> int:
    """Host memory that can be had without swapping, as the kernel estimates it."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_seconds(name: str, value: object, *, may_be_0: bool = False) -> None:
    """Raise ConfigError unless an argument is a positive number of seconds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value > 0 or (may_be_0 and value == 0)):  # type: ignore[operator]
        raise ConfigError(f"{name} is {value!r}; give a positive number of seconds{', or 0' if may_be_0 else ''}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(choices)}")


def _check_codec(name: str) -> None:
    if name == "auto":
        return
    try:
        codec_named(name)
    except UnknownCodecError as exc:
        why = str(exc) if name.startswith("planes:") else f"choose one of auto, {', '.join(codec_names())}"
        raise ConfigError(f"codec is {name!r}; {why}") from exc


def _check_chunk_bytes(value: int) -> None:
    _check_count("chunk_bytes", value, MIN_CHUNK_BYTES)
    if value > MAX_CHUNK_BYTES or value % 4096:
        raise ConfigError(
            f"chunk_bytes is {value}; give a multiple of 4,096 from {MIN_CHUNK_BYTES:,} to {MAX_CHUNK_BYTES:,}, or None"
        )


def _check_count(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} is {value!r}; give a whole number of at least {minimum:,}")

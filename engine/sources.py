"""Where the bytes of an extent live, and copies of many extents at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tidegate.codec.words import WordType

from .errors import InternalError, TornSnapshotError
from .tensors import reach

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes that any copy keeps bit for bit; 16-byte elements travel as two of 8."""

_SMALL_BYTES = 32 << 10
_SPILL_BYTES = 64 << 20
_GROUP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Packing:
    """How a tensor with gaps lies in its storage: elements of `carrier`, at `strides`."""

    carrier: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Packing:
        """Describe a tensor of that itemsize and geometry."""
        if itemsize > 8:
            parts = itemsize // 8
            return cls(torch.int64, (*shape, parts), (*(stride * parts for stride in strides), 1))
        return cls(_CARRIERS[itemsize], shape, strides)


@dataclass(slots=True, eq=False)
class ExtentSource:
    """The live bytes of an extent. Never changed once made; not frozen, as 100,000 frozen ones take too long to make.

    Attributes:
        storage: The storage that holds them; kept alive from here.
        start_bytes: Where in the storage they begin; for a packed extent, where its first element is.
        num_bytes: Length of the extent.
        word: Its word type.
        device: Where the storage is.
        tensor_index: The first tensor that views it, for messages.
        owner: That tensor.
        packing: For a tensor stored without its gaps, how to gather it; else None.
        more_owners: The other tensors that view it.
    """

    storage: torch.UntypedStorage
    start_bytes: int
    num_bytes: int
    word: WordType
    device: torch.device
    tensor_index: int
    owner: torch.Tensor
    packing: Packing | None = None
    more_owners: tuple[torch.Tensor, ...] = ()

    def as_bytes(self) -> torch.Tensor | None:
        """View the live memory.

        Returns:
            Shape (num_bytes,), uint8, on the extent's device, sharing its memory; None for a packed extent.

        Raises:
            TornSnapshotError: The storage was made smaller since the state was described.
        """
        if self.packing is not None:
            return None
        if self.device.type != "cpu" or self.num_bytes == 0:
            return self._view(torch.uint8, (self.num_bytes,), (1,))
        self._check_reach(self.num_bytes)
        return bytes_at(self.storage.data_ptr() + self.start_bytes, self.num_bytes, self.storage)

    def copy_to(self, out: torch.Tensor, offset: int = 0, *, non_blocking: bool = False) -> None:
        """Copy bytes [offset, offset + out.numel()) of the extent.

        Blocks, but for a copy on one device or a `non_blocking` one into pinned memory. Makes no temporary larger than
        64 MiB on the CPU; a copy of a packed piece between devices makes one as large as the piece.

        Args:
            out: Shape (n,), uint8, contiguous, any device.
            offset: For a packed extent a multiple of its itemsize, and so is n.
            non_blocking: As for `Tensor.copy_`.
        """
        end = offset + out.numel()
        if out.dtype != torch.uint8 or not 0 <= offset <= end <= self.num_bytes:
            raise InternalError(f"bytes {offset}-{end} of an extent of {self.num_bytes} cannot go into {out.dtype}")
        if offset == end:
            return
        with torch.no_grad():
            whole = self.as_bytes()
            if whole is not None:
                out.copy_(whole[offset:end], non_blocking=non_blocking)
            else:
                self._gather(out, offset, end, non_blocking)

    def is_whole(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the extent is just its owner's elements in a row, of this dtype and on this device, and still is.

        Not for complex32, which few operators take, and not where the elements are not the stored bytes.
        """
        owner = self.owner
        return (
            owner.dtype == dtype and dtype.itemsize <= 8 and not dtype.is_complex
            and self.device == device
            and owner.nbytes == self.num_bytes
            and self.packing is None
            and owner.is_contiguous()
            and not (owner.is_conj() or owner.is_neg())
            and owner.data_ptr() == self.storage.data_ptr() + self.start_bytes
        )

    def _view(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        # set_ would let a storage grow to what is asked for, so look first.
        self._check_reach(reach(shape, strides) * dtype.itemsize)
        view = torch.empty(0, dtype=dtype, device=self.device)
        return view.set_(self.storage, self.start_bytes // dtype.itemsize, shape, strides)

    def _check_reach(self, num_bytes: int) -> None:
        if self.storage.nbytes() < self.start_bytes + num_bytes:
            raise TornSnapshotError(
                f"the storage of tensor {self.tensor_index} was made smaller while it was being saved; change the "
                "state only after save_async has returned",
                stage="stage",
            )

    def _gather(self, out: torch.Tensor, offset: int, end: int, non_blocking: bool) -> None:
        packing = self.packing
        if packing is None:
            return
        size = packing.carrier.itemsize
        if offset % size or end % size:
            raise InternalError(f"a packed extent of {size}-byte elements cannot be cut at {offset}-{end}")
        view = self._view(packing.carrier, packing.shape, packing.strides)
        if out.storage_offset() % size:
            for start in range(offset, end, _SPILL_BYTES):
                stop = min(start + _SPILL_BYTES, end)
                piece = torch.empty((stop - start) // size, dtype=packing.carrier, device=out.device)
                _fill(piece, view, start // size, stop // size)
                out[start - offset : stop - offset].copy_(piece.view(torch.uint8))
            return
        _fill(out.view(packing.carrier), view, offset // size, end // size, non_blocking)


def bytes_at(address: int, num_bytes: int, owner: object) -> torch.Tensor:
    """View host memory by a storage of its own.

    A view of the owner's storage would do, were it not that `numpy()` of a view forbids to resize it for ever.

    Args:
        address: Where the memory begins.
        num_bytes: How long it is; at least 1.
        owner: Kept alive by what is returned.

    Returns:
        Shape (num_bytes,), uint8, on the CPU.
    """
    window = (ctypes.c_ubyte * num_bytes).from_address(address)
    window.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(window, dtype=torch.uint8)


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's version counter; 0 for an inference tensor, which keeps none."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the version counters of many tensors."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # one is an inference tensor
        return [version_of(tensor) for tensor in tensors]


def unchanged_since(tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a check that tensors, DTensors among them, still have the versions that they have now.

    What changes a DTensor in place counts up its own version, not that of its shard. The check raises
    TornSnapshotError.
    """
    before = versions_of(tensors)

    def check() -> None:
        if versions_of(tensors) != before:
            raise TornSnapshotError(
                "a tensor was changed in place while it was being read. Nothing was committed. Change the state only "
                "after it was staged and, in lazy mode, by the optimizers that are fenced",
                stage="stage",
            )

    return check


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, sharing its memory; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = to_local()
        return shard


def _fill(out: torch.Tensor, view: torch.Tensor, first: int, end: int, non_blocking: bool = False) -> None:
    """Copy elements [first, end) of a strided view, in row-major order, into a flat tensor."""
    done = 0
    for box in _boxes(view, first, end):
        size = box.numel()
        out[done : done + size].view(box.shape).copy_(box, non_blocking=non_blocking)
        done += size


def _boxes(view: torch.Tensor, first: int, end: int) -> Iterator[torch.Tensor]:
    """Cut a row-major range of a view into boxes: the rest of a row, whole rows, the start of a row; so in each row."""
    if first >= end:
        return
    if view.dim() == 0 or (first == 0 and end == view.numel()):
        yield view
        return
    row = view.numel() // view.shape[0]
    top, head = divmod(first, row)
    bottom, tail = divmod(end, row)
    if top == bottom:
        yield from _boxes(view[top], head, tail)
        return
    if head:
        yield from _boxes(view[top], head, row)
        top += 1
    if top < bottom:
        yield view[top:bottom]
    if tail:
        yield from _boxes(view[bottom], 0, tail)


def gather(sources: Sequence[ExtentSource], out: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy whole extents back to back.

    Blocks where `out` is on the CPU; otherwise the copies are queued on the current stream. From a GPU to the CPU it
    takes at most 1 MiB of device memory for a moment.

    Args:
        sources: Extents of one device.
        out: Shape (sum of their bytes,), uint8, contiguous, any device.
        non_blocking: From a GPU into pinned memory: only queue the copies.
    """
    total_bytes = sum(source.num_bytes for source in sources)
    if out.dtype != torch.uint8 or out.numel() != total_bytes or not out.is_contiguous():
        raise InternalError(f"{total_bytes} bytes cannot go into {out.numel()} elements of {out.dtype}")
    with torch.no_grad():
        if out.device.type == "cpu":
            if sources and sources[0].device.type == "cuda":
                _gather_through_device(sources, out, non_blocking)
            else:
                _gather_on_cpu(sources, out)
        else:
            _gather_on_device(sources, out)


def gather_runs(
    runs: Iterable[tuple[torch.UntypedStorage, int | None, int]],
    out: torch.Tensor,
    otherwise: Callable[[int, torch.Tensor], None],
) -> None:
    """Copy runs of host memory back to back. Blocks, with the GIL: a torch copy costs ten times what short ones take.

    Args:
        runs: The storage of each, where in it it begins, and its bytes.
        out: Shape (sum of their bytes,), uint8, contiguous, on the CPU.
        otherwise: Copies a run that is long, begins at None, or is not there any more, given its number and its place.
    """
    address, done, memmove = out.data_ptr(), 0, ctypes.memmove
    for number, (storage, start, num_bytes) in enumerate(runs):
        if start is not None and num_bytes <= _SMALL_BYTES and start + num_bytes <= storage.nbytes():
            memmove(address + done, storage.data_ptr() + start, num_bytes)
        else:
            otherwise(number, out[done : done + num_bytes])
        done += num_bytes


def _gather_on_cpu(sources: Sequence[ExtentSource], out: torch.Tensor) -> None:
    runs = (
        (s.storage, s.start_bytes if s.packing is None and s.device.type == "cpu" else None, s.num_bytes)
        for s in sources
    )
    gather_runs(runs, out, lambda number, piece: sources[number].copy_to(piece))


def _gather_through_device(sources: Sequence[ExtentSource], out: torch.Tensor, non_blocking: bool) -> None:
    """Bring large extents over one by one, and small ones gathered on their device in groups of at most 1 MiB."""
    group: list[ExtentSource] = []
    done = group_bytes = 0

    def flush() -> None:
        nonlocal group, group_bytes
        if group:
            _bring_group(group, out[done - group_bytes : done], non_blocking)
        group, group_bytes = [], 0

    for source in sources:
        is_large = source.num_bytes > _GROUP_BYTES // 4 or source.packing is not None
        if is_large or group_bytes + source.num_bytes > _GROUP_BYTES:
            flush()
        if is_large:
            source.copy_to(out[done : done + source.num_bytes], non_blocking=non_blocking)
        else:
            group.append(source)
            group_bytes += source.num_bytes
        done += source.num_bytes
    flush()


def _bring_group(group: Sequence[ExtentSource], out: torch.Tensor, non_blocking: bool) -> None:
    try:
        gathered = torch.empty(out.numel(), dtype=torch.uint8, device=group[0].device)
    except torch.OutOfMemoryError:
        pieces = torch.split_with_sizes(out, [source.num_bytes for source in group])
        for source, piece in zip(group, pieces, strict=True):
            source.copy_to(piece, non_blocking=non_blocking)
        return
    _gather_on_device(group, gathered)
    out.copy_(gathered, non_blocking=non_blocking)


def _gather_on_device(sources: Sequence[ExtentSource], out: torch.Tensor) -> None:
    """Copy in few kernels: whole tensors of one dtype as they are; else the widest elements that all places allow."""
    dtype = sources[0].owner.dtype if sources else torch.uint8
    if out.data_ptr() % dtype.itemsize == 0 and all(source.is_whole(dtype, out.device) for source in sources):
        # As integers: a foreach copy of bf16 goes through fp32 and loses the payload of a NaN.
        carrier = _CARRIERS[dtype.itemsize]
        flat = [source.owner.view(-1).view(carrier) for source in sources]
        torch._foreach_copy_(torch.split_with_sizes(out.view(carrier), [t.numel() for t in flat]), flat)
        return
    size = _common_itemsize(sources, out)
    carrier = _CARRIERS[size]
    slices: list[torch.Tensor] = []
    views: list[torch.Tensor] = []
    pieces = torch.split_with_sizes(out, [source.num_bytes for source in sources])
    for source, piece in zip(sources, pieces, strict=True):
        if source.packing is not None or source.device != out.device:
            source.copy_to(piece)
        elif source.num_bytes:
            views.append(source._view(carrier, (source.num_bytes // size,), (1,)))
            slices.append(piece.view(carrier))
    if views:
        torch._foreach_copy_(slices, views)


def _common_itemsize(sources: Sequence[ExtentSource], out: torch.Tensor) -> int:
    """Return the most bytes, up to 8, that divide every length, every offset and every address."""
    bits = int(out.storage_offset()) | out.data_ptr() | 8
    for source in sources:
        bits |= source.num_bytes
        if source.packing is None:
            bits |= source.start_bytes | source.storage.data_ptr()
    return bits & -bits


def scatter(chunk: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Cut a chunk into tensors that each have a storage of their own.

    Args:
        chunk: Shape (sum of sizes,), uint8, any device.
        sizes: Bytes of each.
    """
    with torch.inference_mode(False), torch.no_grad():
        pieces: Sequence[torch.Tensor]
        pieces = torch.split_with_sizes_copy(chunk, list(sizes))  # type: ignore[func-returns-value,assignment]
        return list(pieces)

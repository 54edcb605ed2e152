"""Look at every live tensor once: what kind it is, and where its bytes lie. What has no plain bytes is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tidegate.codec.words import DTYPE_OF_NAME, WORD_OF_DTYPE, WordType, dtype_name

from .sources import Packing
from .tensors import TensorSpec, is_too_large, row_major


class RefusedTensorError(Exception):
    """Tensor `index` cannot be saved.

    Args:
        index: Which.
        reason: Why, and what to do.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason


@dataclass(slots=True, eq=False)
class Kind:
    """What all tensors of one class, dtype, geometry, device and flags have in common; one object for all of them.

    Attributes:
        spec: With the strides that it has now.
        word: Its word type.
        strides: In elements.
        device: Where it is.
        num_bytes: Bytes of its elements.
        span_bytes: Bytes from its first element to the end of its furthest.
        packing: How to gather it without its gaps; None if it has none.
    """

    spec: TensorSpec
    word: WordType
    strides: tuple[int, ...]
    device: torch.device
    num_bytes: int
    span_bytes: int
    packing: Packing | None

    @property
    def alone_bytes(self) -> int:
        """Bytes to store for a tensor that shares none with another."""
        return min(self.span_bytes, self.num_bytes)

    @property
    def alone_spec(self) -> TensorSpec:
        """How such a tensor comes back: without its gaps."""
        return replace(self.spec, strides=None) if self.packing else self.spec


@dataclass(slots=True)
class Measured:
    """Columns by tensor, and which tensors share a storage.

    Attributes:
        kinds: The kind of each.
        storages: The storage of each.
        starts: Byte offset of the first element in the storage.
        addresses: Address of the first element; 0 if there is none.
        shared: The indices, in order, of the tensors of each storage that more than one views, by the first of them.
    """

    kinds: list[Kind] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    shared: dict[int, list[int]] = field(default_factory=dict)


def measure(tensors: Sequence[torch.Tensor]) -> Measured:
    """Look at tensors of class Tensor or Parameter.

    Raises:
        RefusedTensorError: One has no plain bytes: meta, sparse, quantised, nested, freed, of a dtype without words.
    """
    found = Measured()
    kind_of: dict[tuple[object, ...], Kind] = {}
    first_of: dict[int, int] = {}
    i = 0
    try:
        for i, tensor in enumerate(tensors):
            dtype = tensor.dtype
            key = kind_key(tensor)
            kind = kind_of.get(key)
            if kind is None:
                kind = kind_of[key] = _kind(tensor, i)
            storage = tensor.untyped_storage()
            start = int(tensor.storage_offset()) * dtype.itemsize
            base = storage.data_ptr() if kind.span_bytes else 0
            if kind.span_bytes and (storage.nbytes() < start + kind.span_bytes or not base):
                raise RefusedTensorError(i, "its storage has been freed; save it while its values are there")
            found.addresses.append(base and base + start)
            found.kinds.append(kind)
            found.storages.append(storage)
            found.starts.append(start)
            first = first_of.setdefault(storage._cdata, i)
            if first != i:
                found.shared.setdefault(first, [first]).append(i)
    except (RuntimeError, NotImplementedError) as exc:  # from tensors without strides or without a storage
        reason = _why_no_bytes(tensors[i]) or f"torch cannot tell where its bytes are ({exc!s:.120}); pass a plain copy"
        raise RefusedTensorError(i, reason) from exc
    return found


def kind_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what makes two tensors of one kind. Raises RuntimeError for one without strides."""
    dtype = tensor.dtype
    return (
        type(tensor), dtype, tensor.shape, tensor.stride(), tensor.device,
        tensor.requires_grad, tensor.is_neg(), dtype.is_complex and tensor.is_conj(),
    )  # fmt: skip


def _kind(tensor: torch.Tensor, index: int) -> Kind:
    reason = _why_no_bytes(tensor)
    if reason:
        raise RefusedTensorError(index, reason)
    shape, strides = tuple(tensor.shape), tensor.stride()
    spec = TensorSpec(
        dtype=dtype_name(tensor.dtype),
        shape=shape,
        strides=None if strides == row_major(shape) else strides,
        device=str(tensor.device),
        parameter=isinstance(tensor, torch.nn.Parameter),
        requires_grad=tensor.requires_grad,
        conj=tensor.is_conj(),
        neg=tensor.is_neg(),
    )
    if is_too_large(spec):
        raise RefusedTensorError(index, f"shape {list(shape)} is larger than a checkpoint can hold; reshape it")
    word = WORD_OF_DTYPE[tensor.dtype]
    packing = Packing.of(spec.itemsize, shape, strides) if spec.reach_bytes > spec.num_bytes else None
    return Kind(spec, word, strides, tensor.device, spec.num_bytes, spec.reach_bytes, packing)


def _why_no_bytes(tensor: torch.Tensor) -> str | None:
    if tensor.is_meta:
        return "it is a meta tensor, which has no values; materialise it, or leave it out"
    if tensor.is_nested:
        return "it is a nested tensor; save x.unbind() or a padded one"
    if tensor.layout != torch.strided:
        kind = "sparse" if "sparse" in str(tensor.layout) else str(tensor.layout).removeprefix("torch.")
        return f"it is a {kind.lstrip('_')} tensor; save x.to_dense(), or its indices and values"
    if tensor.is_quantized:
        return "it is quantised; save x.int_repr() with its scales and zero points, or x.dequantize()"
    if tensor.dtype not in WORD_OF_DTYPE:
        known = ", ".join(sorted(DTYPE_OF_NAME))
        return f"dtype {dtype_name(tensor.dtype)} cannot be stored; convert it to one of {known}"
    return None

"""What a stored tensor is, apart from its bytes; and tensors built from bytes."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tidegate.codec.words import DTYPE_OF_NAME

from .errors import CorruptCheckpointError
from .paths import shown
from .types import JSON

MAX_NDIM = 64
_DEVICE = re.compile(r"[a-z][a-z0-9]{0,31}(:[0-9]{1,4})?")
_FLAGS = ("parameter", "requires_grad", "conj", "neg")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Everything about a tensor but its bytes and where they are.

    Attributes:
        dtype: Its name, without "torch.".
        shape: Sizes.
        strides: In elements; None: row-major without gaps.
        device: Where it was, such as "cpu" or "cuda:0".
        parameter: Whether it is a torch.nn.Parameter.
        requires_grad: Its flag.
        conj: Whether the stored values are the conjugates of its own.
        neg: Whether the stored values are the negatives of its own.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    device: str = "cpu"
    parameter: bool = False
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPE_OF_NAME[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.torch_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements, each counted once for every place in the tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def reach_bytes(self) -> int:
        """Bytes from its first element to the end of its furthest."""
        return reach(self.shape, self.strides) * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def reach(shape: Sequence[int], strides: Sequence[int] | None) -> int:
    """Return how many elements lie from the first to the furthest of a strided tensor, both counted; 0 if empty."""
    if 0 in shape:
        return 0
    if strides is None:
        return math.prod(shape)
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives a new tensor of this shape."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def is_too_large(spec: TensorSpec) -> bool:
    """Tell whether torch could not count a tensor's elements or strides, or the bytes that it reaches over."""
    largest = math.prod(max(size, 1) for size in spec.shape) * spec.itemsize
    return len(spec.shape) > MAX_NDIM or max(largest, spec.reach_bytes) >= 1 << 63


def spec_to_json(spec: TensorSpec) -> JSON:
    """Write a spec; what has its usual value is left out."""
    node: dict[str, JSON] = {"dtype": spec.dtype, "shape": list(spec.shape)}
    if spec.strides is not None:
        node["strides"] = list(spec.strides)
    if spec.device != "cpu":
        node["device"] = spec.device
    node.update((flag, True) for flag in _FLAGS if getattr(spec, flag))
    return node


def spec_from_json(node: JSON) -> TensorSpec:
    """Read and check a spec.

    Raises:
        CorruptCheckpointError: It is malformed, or no tensor could be so.
    """
    if not isinstance(node, dict) or not {"dtype", "shape"} <= node.keys():
        raise _damaged(node, "it has no dtype or shape")
    unknown = node.keys() - {"dtype", "shape", "strides", "device", *_FLAGS}
    if unknown:
        raise _damaged(node, f"unknown {shown(sorted(unknown)[0])}")
    dtype = node["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_OF_NAME:
        raise _damaged(node, f"this build of torch and tidegate knows no dtype {shown(dtype)}")
    shape = _sizes(node, node["shape"])
    strides = _sizes(node, node["strides"]) if "strides" in node else None
    device = node.get("device", "cpu")
    if not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise _damaged(node, "its device is not one")
    flags = {flag: node.get(flag, False) for flag in _FLAGS}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise _damaged(node, "a flag is neither true nor false")
    spec = TensorSpec(dtype, shape, strides, device, **{name: flag is True for name, flag in flags.items()})
    _check_spec(node, spec)
    return spec


def _sizes(node: JSON, sizes: JSON) -> tuple[int, ...]:
    if not isinstance(sizes, list) or len(sizes) > MAX_NDIM:
        raise _damaged(node, f"its shape or strides are not a list of at most {MAX_NDIM}")
    numbers = tuple(size for size in sizes if type(size) is int and 0 <= size < 1 << 63)
    if len(numbers) != len(sizes):
        raise _damaged(node, "a size or stride is no whole number")
    return numbers


def _check_spec(node: JSON, spec: TensorSpec) -> None:
    if spec.strides is not None and len(spec.strides) != len(spec.shape):
        raise _damaged(node, "it has as many strides as sizes no more")
    if is_too_large(spec):
        raise _damaged(node, "it is larger than memory can be")
    dtype = spec.torch_dtype
    if spec.conj and not dtype.is_complex:
        raise _damaged(node, "only complex tensors have conjugates")
    if spec.requires_grad and not (dtype.is_complex or dtype.is_floating_point):
        raise _damaged(node, "only floating-point tensors have gradients")
    if spec.neg and dtype == torch.bool:
        raise _damaged(node, "a bool has no sign to flip")


def _damaged(node: JSON, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"a tensor's description {shown(node)} is damaged: {why}", stage="open")


@contextmanager
def quiet_complex32() -> Iterator[None]:
    """Keep torch from warning that few operators take complex32: it is only stored here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental", category=UserWarning)
        yield


class TensorMaker:
    """Makes tensors of one spec over given bytes.

    Args:
        spec: What to make.
    """

    __slots__ = ("_dtype", "_finish", "_itemsize", "_seeds", "_shape", "_spec", "_strides")

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec
        self._dtype = spec.torch_dtype
        self._itemsize = spec.itemsize
        self._seeds: dict[torch.device, torch.Tensor] = {}
        self._shape = spec.shape
        self._strides = row_major(spec.shape) if spec.strides is None else spec.strides
        self._finish = spec.parameter or spec.requires_grad or spec.conj or spec.neg

    def make(self, extent: torch.Tensor, device: torch.device, offset: int) -> torch.Tensor:
        """Make a tensor that shares the memory of an extent.

        Args:
            extent: Shape (n,), uint8, at the start of its storage.
            device: Where it is.
            offset: Byte in it at which the first element is; a multiple of the itemsize.

        Returns:
            A tensor that is nobody's view, so that it may be changed in place, and a leaf of autograd.
        """
        seed = self._seeds.get(device)
        if seed is None:
            seed = self._seeds[device] = torch.empty(0, dtype=self._dtype, device=device)
        # Of a tensor given to set_ only the storage counts; to ask for the storage itself takes as long as all of this.
        place = offset // self._itemsize
        made = seed.new_empty(0).set_(extent, place, self._shape, self._strides)  # type: ignore[call-overload]
        return self._finished(made) if self._finish else made

    def _finished(self, made: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        if spec.neg:
            made = torch._neg_view(made)
        if spec.conj:
            made = made.conj()
        if spec.parameter:
            return torch.nn.Parameter(made, requires_grad=spec.requires_grad)
        return made.requires_grad_(spec.requires_grad)

"""Copy and view tensors as what they are stored as: bits, whatever they mean."""

from __future__ import annotations

import torch

from .tensors import TensorSpec, reach

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes that any copy keeps bit for bit. On a GPU, one of bf16 may go through fp32 and lose the payload of a NaN."""


def as_stored_row(target: torch.Tensor, spec: TensorSpec) -> torch.Tensor | None:
    """View a tensor's memory as the bytes that are stored for it.

    Args:
        target: A strided tensor of the spec's shape and dtype.
        spec: What is stored.

    Returns:
        Shape (numel × itemsize,), uint8, sharing its memory; None where the stored bytes are other ones, or lie in
        another order or with gaps.
    """
    if not is_stored_row(target, spec):
        return None
    plain = _plain(target.detach())
    if spec.strides is None:
        return plain.view(-1).view(torch.uint8)
    return plain.as_strided((plain.numel(),), (1,), plain.storage_offset()).view(torch.uint8)


def is_stored_row(target: torch.Tensor, spec: TensorSpec) -> bool:
    """Tell whether `as_stored_row` finds a row, which takes a few views to make."""
    if (target.is_conj(), target.is_neg()) != (spec.conj, spec.neg):
        return False
    if spec.strides is None:
        return target.is_contiguous()
    return target.stride() == spec.strides and reach(spec.shape, spec.strides) == target.numel()


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor of the same shape and dtype, whatever the strides of both, bit for bit.

    Only where one of them is lazily conjugated or negated and the other is not, values are computed.
    """
    target, source = target.detach(), source.detach()
    if (target.is_conj(), target.is_neg()) == (source.is_conj(), source.is_neg()):
        target, source = as_integers(target), as_integers(source)
    target.copy_(source)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements as integers, those of 16 bytes as two along one more dimension."""
    plain = _plain(tensor)
    if plain.itemsize not in _CARRIERS:
        plain = torch.view_as_real(plain)
    return plain.view(_CARRIERS[plain.itemsize])


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a tensor without lazy conjugation and negation."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor

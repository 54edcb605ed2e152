"""Copy and view tensors as what they are stored as: bits, whatever they mean."""

from __future__ import annotations

import torch

from .tensors import TensorSpec, reach

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes that any copy keeps bit for bit. On a GPU, one of bf16 may go through fp32 and lose the payload of a NaN."""


def is_stored_row(target: torch.Tensor, spec: TensorSpec) -> bool:
    """Tell whether a tensor's memory holds just the bytes that are stored for it, in their order and without gaps.

    Args:
        target: A strided tensor of the spec's shape and dtype.
        spec: What is stored.
    """
    if target.is_conj() != spec.conj or target.is_neg() != spec.neg:
        return False
    if spec.strides is None:
        return target.is_contiguous()
    return target.stride() == spec.strides and reach(spec.shape, spec.strides) == target.numel()


def stored_row(target: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """View the memory of a tensor for which `is_stored_row` holds as bytes: shape (numel × itemsize,), uint8."""
    plain = target.detach()
    if spec.conj or spec.neg:
        plain = _plain(plain)
    if spec.strides is None:
        return plain.view(-1).view(torch.uint8)
    return plain.as_strided((plain.numel(),), (1,), plain.storage_offset()).view(torch.uint8)


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

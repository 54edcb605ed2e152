"""Why a value cannot be saved, and what to pass instead."""

from __future__ import annotations

import dataclasses
import enum
import random
import types

import numpy as np
import torch

_BUILTIN_BASES = (bool, int, float, complex, str, bytes, bytearray, dict, list, tuple, set, frozenset)


def why_refused(x: object) -> str:
    """Say what a value is that no rule covers, and what to do about it."""
    name = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
    return _tensor_reason(x, name) or _hint_reason(x, name) or (
        f"a {name} cannot be saved; pass plain values, tensors, arrays, dataclasses or containers of those"
    )


def _tensor_reason(x: object, name: str) -> str | None:
    if not isinstance(x, torch.Tensor):
        return None
    if type(x).__name__ == "DTensor":
        return "a DTensor cannot be saved here; give CheckpointEngine its process_group, or use tidegate.dcp"
    if isinstance(x, (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)):
        return "the parameter is uninitialized; run the model once before saving"
    return f"a tensor of class {name} cannot be saved; pass the plain tensors that it is made of"


def _hint_reason(x: object, name: str) -> str | None:
    if isinstance(x, type):
        return f"a class ({x.__qualname__}) cannot be saved; save its name"
    if isinstance(x, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
        calls = {torch.Generator: "get_state()", random.Random: "getstate()", np.random.RandomState: "get_state()"}
        return f"a {name} cannot be saved; pass its {calls.get(type(x), 'bit_generator.state')}"
    if callable(getattr(x, "state_dict", None)):
        return f"a {name} cannot be saved; pass its state_dict()"
    if isinstance(x, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.LambdaType)):
        return f"a function ({x.__qualname__}) cannot be saved; leave it out, or save what it takes to build it again"
    if isinstance(x, types.ModuleType | types.GeneratorType):
        return f"a {name} cannot be saved; leave it out"
    if isinstance(x, np.ndarray):
        return f"a {name} cannot be saved; pass np.asarray(x), and a mask or field names on their own"
    if dataclasses.is_dataclass(x) or isinstance(x, enum.Enum):
        return f"a {name} cannot be saved, as it is built on another container; pass a dict of its fields"
    for base in _BUILTIN_BASES:
        if isinstance(x, base):
            return f"a {name} cannot be saved, as it would not come back as one; convert it with {base.__name__}(x)"
    return None

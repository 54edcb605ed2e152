"""Keep `optimizer.step()` from changing what a lazy save is still reading."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from .job import SaveJob


class Fence:
    """The optimizers whose tensors may be read in place, and the wait before they step.

    Args:
        current_job: Returns the save in flight, if any.
    """

    def __init__(self, current_job: Callable[[], SaveJob | None]) -> None:
        self._current_job = current_job
        self._optimizers: list[torch.optim.Optimizer] = []
        self._hooks: list[RemovableHandle] = []

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Own this optimizer's tensors, and wait before each of its steps."""
        self._optimizers.append(optimizer)
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.wait()))

    def wait(self) -> None:
        """Block until the save in flight has read everything that it reads in place."""
        while (job := self._current_job()) is not None and not job.future.is_staged:
            start_s = time.perf_counter()
            job.future.wait_staged()
            job.fence_s += time.perf_counter() - start_s

    def owned_storages(self) -> set[int]:
        """Addresses of the storages of all parameters and optimizer states."""
        tensors = [p for o in self._optimizers for group in o.param_groups for p in group["params"]]
        tensors += [
            value
            for o in self._optimizers
            for state in o.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def detach(self) -> None:
        """Forget the optimizers and remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._optimizers.clear()

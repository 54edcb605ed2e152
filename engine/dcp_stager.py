"""torch.distributed.checkpoint's AsyncStager: what `dcp.async_save` may read while the training goes on.

Two ways. *copy*: every tensor is copied on its own device before `stage` returns. *lazy*: what the optimizers own is
read in place while forward and backward run, and `optimizer.step()` waits until it has been read; the rest is copied.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .dcp_flight import Flight
from .dcp_writer import TidegateWriter
from .errors import ConfigError, WaitTimeoutError
from .fence import owned_storages
from .sources import unchanged_since

StageMode = Literal["copy", "lazy"]
_POLL_S = 0.05


class TidegateStager(AsyncStager):
    """Stages states for a `TidegateWriter`, one save in flight.

        stager = TidegateStager(writer, mode="lazy", optimizers=[optimizer])
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager, checkpoint_id="step-1200")

    For `AsyncCheckpointerType.THREAD`, which is DCP's default; a checkpointer in another process cannot read in place.

    Args:
        writer: The writer of the same `async_save`.
        mode: "copy" or "lazy".
        optimizers: Whose parameters and states "lazy" reads in place.
        fence_timeout_s: The longest that `optimizer.step()` waits.

    Raises:
        ConfigError: An argument is wrong.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        writer: TidegateWriter,
        *,
        mode: StageMode = "copy",
        optimizers: list[torch.optim.Optimizer] | None = None,
        fence_timeout_s: float = 600.0,
    ) -> None:
        if mode not in get_args(StageMode):
            raise ConfigError(f"mode is {mode!r}; choose one of {', '.join(get_args(StageMode))}")
        if mode == "lazy" and not optimizers:
            raise ConfigError("lazy staging needs the optimizers whose tensors it may read in place")
        self._writer = writer
        self._mode = mode
        self._optimizers = list(optimizers or ())
        self._timeout_s = fence_timeout_s
        self._flight: Flight | None = None
        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(lambda *_: self.wait_read()) for optimizer in self._optimizers
        ]

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state that keeps its values. Blocks for the copies, and for the save before this one."""
        self._writer.wait_idle()
        copier = _Copier(owned_storages(self._optimizers) if self._mode == "lazy" else frozenset())
        staged: dict[str, Any] = copier.copy(state_dict)
        events = [_event_on(device) for device in copier.gpus]
        self._flight = flight = Flight(events, unchanged_since(copier.live))
        self._writer.expect(flight)
        return staged

    def wait_read(self) -> None:
        """Block until what is read in place has been read, or the save is over.

        Raises:
            WaitTimeoutError: Neither came in `fence_timeout_s` seconds.
        """
        flight = self._flight
        if flight is None or self._mode != "lazy":
            return
        deadline_s = time.monotonic() + self._timeout_s
        while not flight.wait_read(_POLL_S):
            if time.monotonic() > deadline_s:
                raise WaitTimeoutError(
                    f"the save has not read the optimizer's tensors within {self._timeout_s} s, and they may not "
                    "change before; look at what keeps it"
                )
        self._flight = None

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _Copier:
    """Copies a state's structure, and its tensors but for those in given storages.

    Attributes:
        live: The tensors that were left where they are, and the DTensors that they are shards of.
        gpus: The CUDA devices that tensors lie on.
    """

    def __init__(self, owned: frozenset[int]) -> None:
        self.live: list[torch.Tensor] = []
        self.gpus: set[torch.device] = set()
        self._owned = owned
        self._copies: dict[tuple[object, ...], torch.Tensor] = {}

    def copy(self, x: Any) -> Any:
        """Copy a value. Tied tensors stay tied."""
        if isinstance(x, DTensor):
            with torch.no_grad():
                local = self._tensor(x.to_local(), x)
            return DTensor.from_local(
                local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
            ).requires_grad_(x.requires_grad)
        if isinstance(x, torch.Tensor):
            return self._tensor(x, x).requires_grad_(x.requires_grad)
        if isinstance(x, Mapping):
            return {key: self.copy(value) for key, value in x.items()}
        if type(x) in (list, tuple):
            return type(x)(map(self.copy, x))
        return x

    def _tensor(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cuda":
            self.gpus.add(tensor.device)
        if tensor.numel() and tensor.untyped_storage().data_ptr() in self._owned:
            self.live += (tensor, whole)  # what changes a DTensor in place counts up its version, not its shard's
            return tensor.detach()
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if key not in self._copies or not tensor.numel():
            with torch.no_grad():
                self._copies[key] = tensor.detach().clone()
        return self._copies[key].detach()


def _event_on(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event

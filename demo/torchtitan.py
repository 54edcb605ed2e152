"""tidegate in torchtitan: a mixin for its CheckpointManager, which takes a storage only by being subclassed.

    from torchtitan.components.checkpointer.dcp import CheckpointManager

    class TidegateCheckpointManager(TidegateCheckpoints, CheckpointManager):
        pass

Set `keep_latest_k = 0`, so that torchtitan deletes nothing: old checkpoints go after a commit, by `keep_last` here.
Exports for Hugging Face go on as they were.
"""

from __future__ import annotations

import re
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import tidegate
from tidegate.dcp import TidegateReader, TidegateStager, TidegateWriter

_STEP = re.compile(r"step-(\d+)")


class TidegateCheckpoints:
    """Overrides where a CheckpointManager saves to, loads from, and looks for steps.

    Attributes:
        keep_last: How many checkpoints stay; None: all.
    """

    keep_last: int | None = None
    _writer: TidegateWriter | None = None
    _stager: TidegateStager | None = None

    @torch.no_grad()
    def dcp_save(
        self: Any,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: str,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | None:
        """Save as torchtitan's does; `async_mode` may be any of its own, and all but "disabled" stage on the device."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        if self._writer is None:
            self._writer = TidegateWriter(self.folder, keep_last=self.keep_last)
            self._stager = TidegateStager(self._writer)
        step = f"step-{_step_of(checkpoint_id)}"
        if str(getattr(async_mode, "value", async_mode)) == "disabled":
            dcp.save(state_dict, storage_writer=self._writer, checkpoint_id=step)
            return None
        future = dcp.async_save(
            state_dict,
            storage_writer=self._writer,
            async_stager=self._stager,
            checkpoint_id=step,
            process_group=self.pg,
        )
        future.add_done_callback(self._writer.abort_if_failed)
        return future

    def dcp_load(
        self: Any, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load as torchtitan's does."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        with TidegateReader(self.folder, step=_step_of(checkpoint_id)) as reader:
            dcp.load(state_dict, storage_reader=reader)
        if "model" in self.states:
            self.states["model"].load_state_dict(state_dict)

    def _find_load_step(self: Any, folder: str = "") -> int:
        """Return the newest committed step; -1 for none. torchtitan looks for a `.metadata` file, which we have not."""
        with tidegate.CheckpointEngine(folder or self.folder) as engine:
            return max(engine.steps(), default=-1)

    def _close(self: Any) -> None:
        if self._stager is not None:
            self._stager.close()
            self._writer.close()
        super()._close()


def _step_of(checkpoint_id: str) -> int:
    match = _STEP.search(checkpoint_id.rstrip("/").rpartition("/")[2])
    if match is None:
        raise ValueError(f"{checkpoint_id!r} does not end in a step, as in 'step-1200'")
    return int(match[1])

"""Asynchronous, pipelined, lossless checkpoints for PyTorch training.

    engine = tidegate.CheckpointEngine("runs/7", keep_last=3)
    for step, batch in enumerate(loader):
        train_step(batch)
        if step % 500 == 0:
            engine.wait()                                 # the earlier save; raises what went wrong in it
            future = engine.save_async(state, step=step)  # returns after the snapshot
    engine.close()

    state = engine.load()                                 # the newest committed checkpoint
    tidegate.save(state, "model.tg")
    state = tidegate.load("model.tg")

All errors are in `tidegate.errors`. How a save works: pipeline.py.
"""

from .engine import CheckpointEngine
from .errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWarning,
    ConfigError,
    CorruptCheckpointError,
    LoadError,
    SaveError,
    StepExistsError,
    UnsupportedStateError,
)
from .future import SaveFuture
from .oneshot import load, save
from .report import SaveReport
from .version import __version__

__all__ = [
    "CheckpointEngine",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointWarning",
    "ConfigError",
    "CorruptCheckpointError",
    "LoadError",
    "SaveError",
    "SaveFuture",
    "SaveReport",
    "StepExistsError",
    "UnsupportedStateError",
    "__version__",
    "load",
    "save",
]

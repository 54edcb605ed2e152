"""Convert checkpoints of other formats to ours and back, through bounded memory.

What is read is mapped, not loaded; what is written is decoded into a mapped file. So a checkpoint of any size goes
through the few buffers of the pipeline. Nothing that a file names is run: torch.save's and DCP's pickles are read by
readers that build tensors and plain values only.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from tidegate.codec.words import DTYPE_OF_NAME, dtype_name
from tidegate.storage.base import Store

from .commit import read_commits
from .container import read_index
from .convert_in import dcp_to_root, state_to_root
from .dcp_files import METADATA_NAME
from .errors import CheckpointNotFoundError, ConfigError, UnsupportedStateError
from .flatten import flatten
from .load import manifest_text, open_checkpoint
from .load_plan import LoadPlan, plan_load
from .manifest import Manifest, parse_manifest
from .oneshot import open_file, save
from .open_root import open_root
from .parts import PartPaths
from .rebuild import rebuild
from .restore import load_state
from .safetensors_file import create_safetensors, read_safetensors
from .scratch import scratch_bytes
from .sharded_load import load_sharded, parse_commit_manifest
from .sharded_manifest import ShardedManifest, is_sharded
from .table import make_tensors

Format = Literal["tidegate", "torch", "safetensors", "dcp"]
_SUFFIXES: Mapping[str, Format] = {
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch",
    ".tg": "tidegate",
}  # fmt: skip


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Format | None = None,
    step: int | None = None,
    part: str | None = None,
    codec: str = "auto",
) -> None:
    """Convert a checkpoint. Blocks.

    Args:
        source: A `.tg` file, a root of ours (folder or URL), a torch.save file, a safetensors file, or a folder that
            DCP's FileSystemWriter has written.
        target: A file, by whose suffix the format is known, or a folder or URL: of ours, or of DCP with `to="dcp"`.
        to: The target's format, where its name does not tell.
        step: Which step of a root is read (None: the newest), or which a root gets (None: 0).
        part: The path of the part to take, such as "model"; None: all. Only from ours.
        codec: As for `tidegate.save`.

    Raises:
        ConfigError: The formats cannot be told, or neither is ours.
        UnsupportedStateError: The target's format cannot hold something.
        LoadError, SaveError: Reading or writing failed. What is in the target is undefined then, unless it is ours.
    """
    came_from, goes_to = _format_of_source(source), to or _format_of_target(target)
    if goes_to not in get_args(Format):
        raise ConfigError(f"to is {to!r}; choose one of {', '.join(get_args(Format))}")
    if "tidegate" not in (came_from, goes_to):
        raise ConfigError(f"{source} is of {came_from} and {target} of {goes_to}; convert through a checkpoint of ours")
    if came_from == "tidegate":
        _from_ours(source, Path(target) if goes_to != "tidegate" else target, goes_to, step, part, codec)
    elif came_from == "dcp":
        dcp_to_root(Path(source), target, step=step or 0, codec=codec)
    else:
        _save_ours(_read_state(Path(source), came_from), target, step or 0, codec)


def _format_of_source(source: str | os.PathLike[str]) -> Format:
    path = Path(source)
    if "://" in os.fspath(source) or (path.is_dir() and not (path / METADATA_NAME).is_file()):
        return "tidegate"
    if path.is_dir():
        return "dcp"
    if not path.is_file():
        raise CheckpointNotFoundError(f"there is no checkpoint at {source}")
    return _SUFFIXES.get(path.suffix, "torch")


def _format_of_target(target: str | os.PathLike[str]) -> Format:
    return _SUFFIXES.get(Path(target).suffix, "tidegate")


def _read_state(path: Path, came_from: Format) -> object:
    if came_from == "safetensors":
        return read_safetensors(path)
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as exc:
        raise UnsupportedStateError(f"cannot convert {path}: {exc}") from exc
    except (RuntimeError, ValueError, OSError) as exc:
        raise ConfigError(f"{path} is no file of torch.save's that can be mapped: {exc}") from exc


def _save_ours(state: object, target: str | os.PathLike[str], step: int, codec: str) -> None:
    if Path(target).suffix == ".tg":
        save(state, target, codec=codec)
    else:
        state_to_root(state, target, step=step, codec=codec)


def _from_ours(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    goes_to: Format,
    step: int | None,
    part: PartPaths,
    codec: str,
) -> None:
    store, manifest, plan = _open(source, step)
    folder = Path(target).resolve().parent if "://" not in os.fspath(target) else Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if goes_to == "safetensors":
            _to_safetensors(store, manifest, plan, Path(target), part)
            return
        sizes, make = _layout(manifest)
        with scratch_bytes(sizes, folder) as rows:
            state = _filled(store, manifest, plan, make(rows), part)
            if goes_to == "torch":
                torch.save(state, target)
            elif goes_to == "dcp":
                _to_dcp(state, Path(target))
            else:
                _save_ours(state, target, manifest.step if step is None else step, codec)
            del state
    finally:
        store.close()


def _open(
    source: str | os.PathLike[str], step: int | None
) -> tuple[Store, Manifest | ShardedManifest, LoadPlan | None]:
    if "://" not in os.fspath(source) and Path(source).is_file():
        store, key = open_file(source)
        index = read_index(store, key)
        alone = parse_manifest(index.manifest, key)
        return store, alone, plan_load(alone, [index])
    store = open_root(source)
    records = [record for record in read_commits(store)[0] if step in (None, record.step)]
    if not records:
        wanted = "no checkpoint" if step is None else f"no step {step}"
        raise CheckpointNotFoundError(f"{wanted} is committed at {source}")
    text = manifest_text(store, records[-1])
    if is_sharded(text):
        return store, parse_commit_manifest(store, records[-1], text), None
    return store, *open_checkpoint(store, records[-1], text)


def _layout(manifest: Manifest | ShardedManifest) -> tuple[list[int], Any]:
    """Return the bytes of each piece of memory that the state needs, and what makes the empty state of them."""
    if isinstance(manifest, Manifest):
        table = manifest.table
        return table.extent_bytes, lambda rows: rebuild(table.skeleton, make_tensors(table, rows))
    tensors = [(name, DTYPE_OF_NAME[spec.dtype], spec.shape) for name, spec, _ in manifest.shards.tensors()]
    sizes = [dtype.itemsize * torch.Size(shape).numel() for _, dtype, shape in tensors]

    def make(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: row.view(dtype).view(shape) for (name, dtype, shape), row in zip(tensors, rows, strict=True)}

    return sizes, make


def _filled(
    store: Store, manifest: Manifest | ShardedManifest, plan: LoadPlan | None, empty: Any, part: PartPaths
) -> object:
    """Decode the checkpoint into the empty state."""
    if isinstance(manifest, ShardedManifest):
        return load_sharded(store, manifest, map_location=None, targets=empty, into=None, part=part)
    if plan is None:
        raise ConfigError("a checkpoint of one rank needs its plan")
    state = load_state(store, manifest, plan, map_location=None, into=empty)
    return state if part is None else load_state(store, manifest, plan, map_location=None, into=None, part=part)


def _to_safetensors(
    store: Store, manifest: Manifest | ShardedManifest, plan: LoadPlan | None, target: Path, part: PartPaths
) -> None:
    with torch.no_grad():
        sizes, make = _layout(manifest)
        with scratch_bytes(sizes, target.resolve().parent) as rows:
            state = _filled(store, manifest, plan, make(rows), part)
            flat = flatten(state if isinstance(state, Mapping) else {"tensor": state})
            if flat.values:
                raise ConfigError(
                    f"a safetensors file holds tensors alone, and {next(iter(flat.values))} is none; convert a part of "
                    "the checkpoint, as in part='model'"
                )
            described = [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in flat.tensors.items()]
            for name, out in create_safetensors(target, described).items():
                out.copy_(flat.tensors[name].detach().resolve_conj().resolve_neg())
            del state, flat


def _to_dcp(state: object, target: Path) -> None:
    if not isinstance(state, dict):
        raise ConfigError(f"DCP saves dicts; the state is a {type(state).__name__}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        save_dcp(state, storage_writer=FileSystemWriter(target), no_dist=True)

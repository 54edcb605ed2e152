"""Look at checkpoints from a shell: list, inspect, verify, gc, prune, convert. Nothing that a file names is run."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tidegate.storage.base import Store
from tidegate.storage.errors import StorageError
from tidegate.storage.open import open_store

from .commit import CommitRecord, leftovers, read_commits
from .container import read_index
from .errors import CheckpointError, CheckpointNotFoundError, ConfigError
from .load import manifest_text, open_checkpoint
from .manifest import Manifest, parse_manifest
from .rank_object import open_rank_object
from .restore import LoadPlan, check_frames, plan_load
from .retention import KeepBest, KeepPolicy, Retention, retire
from .sharded_manifest import ShardedManifest, is_sharded, parse_sharded
from .translate import load_error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 fine, 1 something is damaged or missing, 2 wrong arguments."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (CheckpointError, StorageError) as exc:
        print(f"tidegate: {exc}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tidegate", description="Look at tidegate checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run, text in (
        ("list", _list, "list the committed steps of a root"),
        ("inspect", _inspect, "show what a checkpoint or a .tg file holds"),
        ("verify", _verify, "read and decode every frame and check every checksum"),
        ("gc", _gc, "delete what no commit holds: leftovers of saves that were killed"),
        ("prune", _prune, "delete the checkpoints that a policy lets go; never what a living one needs"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("root", help="folder or URL of the checkpoints, or a .tg file")
        command.set_defaults(run=run)
        if name in ("inspect", "verify"):
            command.add_argument("--step", type=int, help="the step; default: the newest")
        if name in ("gc", "prune"):
            command.add_argument("--dry-run", action="store_true", help="say what would go, delete nothing")
        if name == "prune":
            command.add_argument("--keep-last", type=int, required=True, help="how many of the newest stay")
            command.add_argument("--keep-every", type=int, help="steps that are multiples of it stay too")
            command.add_argument("--keep-best", metavar="METRIC[:NUM[:min|max]]", help="the best of a metric stay too")
        if name == "gc":
            command.add_argument(
                "--min-age-s", type=float, default=3600.0, help="spare younger ones, which a live save may be writing"
            )
    convert = commands.add_parser("convert", help="convert to or from torch.save, safetensors and DCP's own format")
    convert.add_argument("source", help="a .tg file, a root, a file of torch.save or safetensors, or a folder of DCP's")
    convert.add_argument("target", help="a file of such a suffix, or a folder or URL")
    formats = ("tidegate", "torch", "safetensors", "dcp")
    convert.add_argument("--to", choices=formats, help="the target's format, where its name does not tell")
    convert.add_argument("--step", type=int, help="the step that is read, or that a root gets")
    convert.add_argument("--part", help='the part of ours to take, such as "model"')
    convert.add_argument("--codec", default="auto", help="as for tidegate.save")
    convert.set_defaults(run=_convert)
    return parser


def _convert(args: argparse.Namespace) -> int:
    from .convert import convert

    convert(args.source, args.target, to=args.to, step=args.step, part=args.part, codec=args.codec)
    return 0


def _list(args: argparse.Namespace) -> int:
    store = open_store(args.root)
    records, damaged = read_commits(store)
    for record in records:
        base = f"  difference to step {record.bases[0][0]}" if record.bases else ""
        print(f"step {record.step:>10}  commit {record.sequence:>6}  attempt {record.attempt}{base}")
    for step, error in sorted(damaged.items()):
        print(f"step {step:>10}  DAMAGED: {error}")
    if not records and not damaged:
        raise CheckpointNotFoundError(f"no checkpoint is committed at {store.url}")
    return 1 if damaged else 0


def _inspect(args: argparse.Namespace) -> int:
    store, manifest, plan = _open(args)
    if isinstance(manifest, ShardedManifest):
        return _inspect_ranks(store, manifest)
    table = manifest.table
    raw_bytes = sum(table.extent_bytes)
    stored_bytes = sum(item.entry.header.padded_bytes for item in plan.items)
    print(f"step {manifest.step}, {len(table.tensor_spec)} tensors, {len(plan.items)} frames")
    print(f"raw {raw_bytes:,} bytes, stored {stored_bytes:,} bytes")
    if manifest.derived:
        derived_bytes = sum(manifest.chunks[item.chunk].num_bytes for item in manifest.derived)
        print(f"derived, so not stored: {derived_bytes:,} bytes in {len(manifest.derived)} chunks")
    if manifest.delta is not None:
        print(f"difference to step {manifest.delta.base.step}: {len(manifest.delta.chunks)} chunks")
    if manifest.parts:
        print(f"reduced to {', '.join(manifest.parts)}")
    for name, value in manifest.created.items():
        print(f"{name}: {value}")
    dtypes = Counter(table.specs[spec].dtype for spec in table.tensor_spec)
    print("dtypes: " + ", ".join(f"{name} × {count}" for name, count in dtypes.most_common()))
    return 0


def _verify(args: argparse.Namespace) -> int:
    store, manifest, plan = _open(args)
    if isinstance(manifest, ShardedManifest):
        return _verify_ranks(store, manifest)
    check_frames(store, manifest.table, plan)
    print(f"step {manifest.step}: {len(plan.items)} frames are whole")
    return 0


def _inspect_ranks(store: Store, manifest: ShardedManifest) -> int:
    opened = [open_rank_object(store, manifest, rank) for rank in range(len(manifest.objects))]
    raw_bytes = sum(sum(rank.table.extent_bytes) for rank in opened)
    stored_bytes = sum(item.entry.header.padded_bytes for rank in opened for item in rank.plan.items)
    num_frames = sum(len(rank.plan.items) for rank in opened)
    print(f"step {manifest.step}, {len(manifest.shards.names)} tensors of {len(opened)} ranks, {num_frames} frames")
    print(f"raw {raw_bytes:,} bytes, stored {stored_bytes:,} bytes")
    for name, value in manifest.created.items():
        print(f"{name}: {value}")
    dtypes = Counter(spec.dtype for _, spec, _ in manifest.shards.tensors())
    print("dtypes: " + ", ".join(f"{name} × {count}" for name, count in dtypes.most_common()))
    return 0


def _verify_ranks(store: Store, manifest: ShardedManifest) -> int:
    num_frames = 0
    for rank in range(len(manifest.objects)):
        opened = open_rank_object(store, manifest, rank)
        check_frames(store, opened.table, opened.plan)
        num_frames += len(opened.plan.items)
    print(f"step {manifest.step}: {num_frames} frames of {len(manifest.objects)} ranks are whole")
    return 0


def _gc(args: argparse.Namespace) -> int:
    store = open_store(args.root)
    num_bytes = 0
    for stat in list(leftovers(store, min_age_s=args.min_age_s)):
        num_bytes += stat.num_bytes
        print(f"{'would delete' if args.dry_run else 'deleted'} {stat.key} ({stat.num_bytes:,} bytes)")
        if not args.dry_run:
            store.delete(stat.key)
    print(f"{num_bytes:,} bytes {'would be freed' if args.dry_run else 'freed'}")
    return 0


def _prune(args: argparse.Namespace) -> int:
    store = open_store(args.root)
    policy = KeepPolicy(args.keep_last, args.keep_every, _best(args.keep_best))
    if not any(read_commits(store)):
        raise CheckpointNotFoundError(f"no checkpoint is committed at {store.url}")
    plan = Retention(policy).plan(store)
    for record in plan.delete:
        print(f"{'would delete' if args.dry_run else 'deletes'} step {record.step} (commit {record.sequence})")
    for record in plan.held:
        print(f"keeps step {record.step}, which newer ones are differences to")
    if not args.dry_run:
        retire(store, *plan.delete)
    return 0


def _best(text: str | None) -> KeepBest | None:
    if text is None:
        return None
    name, _, rest = text.partition(":")
    num, _, mode = rest.partition(":")
    if not (num or "1").isdigit():
        raise ConfigError(f"--keep-best is {text!r}; write METRIC:NUM:min or METRIC:NUM:max")
    return KeepBest(name, int(num or "1"), mode or "min")  # type: ignore[arg-type]


def _open(args: argparse.Namespace) -> tuple[Store, Manifest | ShardedManifest, LoadPlan]:
    path = Path(args.root)
    if path.is_file():
        path = path.resolve()  # a link that the caller names is the caller's own; stores follow none
        store: Store = open_store(path.parent)
        try:
            index = read_index(store, path.name)
        except (StorageError, ValueError) as exc:
            raise load_error(exc, f"opening {path}", stage="open") from exc
        manifest = parse_manifest(index.manifest, path.name)
        return store, manifest, plan_load(manifest, [index])
    store = open_store(args.root)
    records, _ = read_commits(store)
    found: list[CommitRecord] = [r for r in records if args.step is None or r.step == args.step]
    if not found:
        wanted = "no checkpoint" if args.step is None else f"no step {args.step}"
        raise CheckpointNotFoundError(f"{wanted} is committed at {store.url}")
    text = manifest_text(store, found[-1])
    if is_sharded(text):
        return store, parse_sharded(text, found[-1].manifest_key), LoadPlan(())
    return store, *open_checkpoint(store, found[-1], text)


if __name__ == "__main__":
    sys.exit(main())



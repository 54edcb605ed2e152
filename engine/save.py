"""The background half of a save: from staged chunks to the commit."""

from __future__ import annotations

import datetime
import platform
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from tidegate.codec.registry import codec_named, codec_names
from tidegate.storage.base import DeviceStore, ObjectWriter, PreparedStore, Store

from .commit import (
    MANIFEST_NAME,
    CommitRecord,
    attempt_key,
    check_bases,
    commit_key,
    parse_commit,
    publish,
    read_commit_bytes,
    read_commits,
    step_folder,
)
from .container import FrameAppender, ObjectRecord
from .errors import CorruptCheckpointError, SaveError, StepExistsError
from .job import SaveJob
from .manifest import Manifest, dump_manifest
from .pipeline import Pipeline
from .report import CodecTotals, SaveReport, busy_s
from .resources import Resources
from .types import JSON
from .version import __version__

_OBJECT_NAME = "rank-00000.tg"


def new_attempt() -> str:
    """Name an attempt: nobody else will."""
    return uuid.uuid4().hex


def check_absent(store: Store, step: int, overwrite: bool) -> None:
    """Refuse a step that is committed. Blocks for one look at the store.

    Raises:
        StepExistsError: It is, and `overwrite` is false.
    """
    if not overwrite and read_commit_bytes(store, step) is not None:
        raise StepExistsError(
            f"step {step} is committed at {store.url} already; pass overwrite=True to replace it", step=step
        )


@dataclass(frozen=True, slots=True)
class Written:
    """An attempt whose objects and manifest are durable, and that is not committed yet."""

    step: int
    attempt: str
    record: ObjectRecord
    totals: Mapping[int, CodecTotals]
    manifest: bytes
    bases: tuple[tuple[int, str], ...]

    def commit(self, sequence: int) -> CommitRecord:
        """Make its COMMIT record."""
        return record_of(self.step, self.attempt, self.manifest, sequence, self.bases)


def write_checkpoint(job: SaveJob, store: Store, resources: Resources, *, overwrite: bool) -> SaveReport:
    """Encode and write the staged chunks, then publish the step. Blocks.

    Either the step is committed and durable when this returns, or it raises and what it wrote is deleted.
    """
    check_absent(store, job.step, overwrite)
    replaces = read_commit_bytes(store, job.step)
    attempt = new_attempt()
    try:
        prepare_store(store, job)
        written = write_attempt(job, store, resources, attempt)
        commit = written.commit(next_sequence(store))
        publish(store, commit, replaces)
        check_bases(store, commit, replaces)
    except BaseException as exc:
        if give_up(store, job.step, attempt):
            raise unconfirmed(job.step, exc) from exc
        raise
    resources.was_committed(job, commit)
    job.replaced = replaced_record(replaces, job.step)
    stored_bytes = written.record.num_bytes + len(written.manifest) + len(commit.dump())
    url = f"{store.url}/{step_folder(job.step)}"
    return make_report(job, resources, url, stored_bytes, written.totals, written.bases)


def write_attempt(job: SaveJob, store: Store, resources: Resources, attempt: str) -> Written:
    """Encode and write the staged chunks and their manifest, under an attempt's name. Blocks."""
    key = attempt_key(job.step, attempt, _OBJECT_NAME)
    texts: list[bytes] = []
    with resources.delta_save(job, store, attempt) as delta:
        record, totals = write_object(
            job, store.create(key, size_hint_bytes=job.plan.raw_bytes // 2), key, resources,
            meanwhile=lambda record: texts.append(dump_manifest(_manifest(job, attempt, (record,)))),
        )  # fmt: skip
        store.compare_and_put(attempt_key(job.step, attempt, MANIFEST_NAME), texts[0], expected=None)
        bases = delta.bases if delta is not None else ()
    return Written(job.step, attempt, record, totals, texts[0], bases)


def commit_attempt(store: Store, step: int, attempt: str, manifest: bytes, replaces: bytes | None) -> CommitRecord:
    """Put the manifest of an attempt whose objects are durable, then its COMMIT record. Blocks.

    Args:
        store: Where.
        step: The step.
        attempt: The attempt.
        manifest: Its manifest.
        replaces: The COMMIT record that it is to replace; None: there must be none.

    Raises:
        ObjectExistsError: Another attempt won.
    """
    store.compare_and_put(attempt_key(step, attempt, MANIFEST_NAME), manifest, expected=None)
    commit = record_of(step, attempt, manifest, next_sequence(store))
    publish(store, commit, replaces)
    return commit


def record_of(
    step: int, attempt: str, manifest: bytes, sequence: int, bases: tuple[tuple[int, str], ...] = ()
) -> CommitRecord:
    """Make the COMMIT record of an attempt with this manifest."""
    return CommitRecord(step, sequence, attempt, len(manifest), xxhash.xxh3_64_intdigest(manifest), bases)


def next_sequence(store: Store) -> int:
    """Return the place of the next commit. Blocks for a look at all COMMIT records."""
    records, _ = read_commits(store)
    return 1 + max((record.sequence for record in records), default=0)


def unconfirmed(step: int, exc: BaseException) -> SaveError:
    """Return the error of a save whose COMMIT record is there although putting it has failed."""
    return SaveError(
        f"save of step {step}: its COMMIT record was put and can be read, but the store did not confirm it "
        f"({exc}), so a crash of the machine may undo it; save again with overwrite=True",
        key=commit_key(step),
        stage="commit",
    )


def prepare_store(store: Store, job: SaveJob) -> None:
    """Let a store find out what it can do, before the first object is created."""
    if isinstance(store, PreparedStore):
        job.notes.extend(store.prepare())
    devices = {device.index or 0 for device in set(job.table.extent_devices) if device.type == "cuda"}
    if devices and isinstance(store, DeviceStore):
        job.notes.extend(store.prepare_for_device(device) for device in sorted(devices))


def write_object(
    job: SaveJob,
    writer: ObjectWriter,
    key: str,
    resources: Resources,
    *,
    stands_alone: bool = False,
    attempt: str = "",
    meanwhile: Callable[[ObjectRecord], None] = lambda record: None,
) -> tuple[ObjectRecord, dict[int, CodecTotals]]:
    """Move the job's chunks into one object and seal it; abort it on any failure. Blocks.

    Args:
        job: The save.
        writer: The object.
        key: Its key.
        resources: What encodes.
        stands_alone: Whether the object holds its manifest itself.
        attempt: The attempt that this manifest names.
        meanwhile: Called with what the object will be, while the last frames are being written.
    """
    appender = FrameAppender(writer, key)
    try:
        job.writes_from_device = appender.takes_device_memory
        totals = Pipeline(lambda staged: resources.encoder_for(job, staged), appender).run(job)
        record = appender.append_tail((lambda: dump_manifest(_manifest(job, attempt, ()))) if stands_alone else None)
        meanwhile(record)
        appender.seal()
        if job.failure is not None:
            raise job.failure
    except BaseException as exc:  # noqa: BLE001 - raised again as the job's first failure
        job.fail(exc)
        writer.abort()
        first = job.failure or exc
        raise first from first.__cause__  # not from `exc`, which may have come of it
    return record, totals


def replaced_record(text: bytes | None, step: int) -> CommitRecord | None:
    """Return what a COMMIT record said that has been replaced; None if there was none, or it is damaged."""
    try:
        return None if text is None else parse_commit(text, step)
    except CorruptCheckpointError:
        return None  # which attempt it named is unknown; `gc` finds what it left


def give_up(store: Store, step: int, attempt: str) -> bool:
    """Delete what a failed attempt wrote, unless it was published after all: then say so.

    What cannot be deleted is a leftover, which readers ignore and `gc` removes.
    """
    try:
        text = read_commit_bytes(store, step)
        if text is not None and attempt.encode() in text:
            return True
        for stat in list(store.list(f"{step_folder(step)}/{attempt}/")):
            store.delete(stat.key)
    except Exception:  # noqa: BLE001 - the save's own failure is what the caller must see
        return False
    return False


def make_report(
    job: SaveJob,
    resources: Resources,
    url: str,
    stored_bytes: int,
    totals: Mapping[int, CodecTotals],
    bases: Sequence[tuple[int, str]] = (),
) -> SaveReport:
    """Sum up a save that has ended well."""
    resources.end_save(job)
    spans = job.timeline.spans()
    names = {codec_named(name).number: name for name in codec_names()}
    return SaveReport(
        step=job.step,
        url=url,
        raw_bytes=job.plan.raw_bytes,
        stored_bytes=stored_bytes,
        stall_s=job.stall_s,
        snapshot_s=job.snapshot_s,
        encode_s=busy_s(spans, "encode"),
        copy_s=busy_s(spans, "copy"),
        write_s=busy_s(spans, "write"),
        wall_s=job.timeline.now(),
        peak_device_bytes=resources.device_bytes,
        peak_host_bytes=resources.take_peak_host_bytes(),
        by_codec={names[number]: total for number, total in sorted(totals.items())},
        snapshot="+".join(sorted(job.modes)),
        fence_s=job.fence_s,
        derived_bytes=sum(job.plan.chunks[item.chunk].num_bytes for item in job.derived.found()),
        base_step=bases[0][0] if bases else None,
        notes=tuple(job.notes),
        timeline=spans,
    )


def made_by() -> dict[str, JSON]:
    """Say, for people, what writes a manifest, and when."""
    return {
        "tidegate": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _manifest(job: SaveJob, attempt: str, objects: tuple[ObjectRecord, ...]) -> Manifest:
    derived, delta = job.derived.found(), job.delta.part if job.delta is not None else None
    return Manifest(
        job.step, attempt, made_by(), job.metadata, objects, job.table, job.plan.chunks, derived, delta, job.parts
    )  # fmt: skip

"""Which chunks are read in place, which versions are watched, and that both are remembered no longer than they hold."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch

from tidegate.chunk_sizes import ChunkSizes
from tidegate.derived import Pair
from tidegate.errors import TornSnapshotError
from tidegate.job import SaveJob, StagedChunk
from tidegate.planned import PlanCache
from tidegate.split import Splitter, split
from tidegate.state import Describer
from tidegate.watch import VersionWatch, runs_of

CHUNK_BYTES = 1 << 16


class Saves:
    """Jobs of states that are saved one after another."""

    def __init__(self) -> None:
        self._describer = Describer()
        self._plans = PlanCache(lambda _: ChunkSizes(CHUNK_BYTES, CHUNK_BYTES))
        self._pairs: dict[int, Pair] = {}

    def job(self, state: object) -> SaveJob:
        table = self._describer.describe(state)
        planned = self._plans.of(table, self._pairs)
        return SaveJob(0, table, planned.plan, {}, chunk_order=planned.chunk_order)


def state() -> dict[str, list[torch.Tensor]]:
    base = torch.randn(6, 4)
    return {
        "large": [torch.randn(3 * CHUNK_BYTES // 4) for _ in range(2)],
        "small": [torch.randn(5) for _ in range(7)],
        "views": [base, base.t(), base[1:]],
        "ints": [torch.arange(9), torch.empty(0)],
    }


def viewing(job: SaveJob, extents: Collection[int]) -> list[int]:
    return [i for i, extent in enumerate(job.table.tensor_extent) if extent in extents]


def test_chunks_that_are_owned_as_a_whole_are_read_in_place() -> None:
    job = Saves().job(state())
    num_extents = len(job.table.extent_bytes)
    for owned in (frozenset({0}), frozenset(range(num_extents)), frozenset(range(0, num_extents, 2)), frozenset()):
        parts = split(job, owned)
        assert sorted(chunk.index for chunk in (*parts.live, *parts.copied)) == list(range(len(job.plan.chunks)))
        assert [chunk for chunk in job.chunk_order if set(chunk.extents) <= owned] == list(parts.live)
        assert parts.copied_on_cpu == parts.copied and not parts.copied_on and not parts.live_on
        for chunks, runs in ((parts.live, parts.read_in_place), (parts.copied, parts.host_copied)):
            extents = {extent for chunk in chunks for extent in chunk.extents}
            assert [i for run in runs for i in run] == viewing(job, extents)
    assert not split(job, frozenset(range(num_extents)), is_cuda_only=True).live
    assert split(job, None).live == tuple(job.chunk_order)


def test_what_is_read_in_place_in_host_memory_goes_first() -> None:
    """Its frames have room before they start, so they, and the fence, would wait for a GPU's before them to have some.

    A table of a state on the CPU stands for one on both: only the devices in it are others.
    """
    job = Saves().job(state())
    gpu = torch.device("cuda", 0)
    num_on_gpu = max(chunk.first_extent for chunk in job.plan.chunks)
    assert num_on_gpu > 0
    job.table = replace(job.table, extent_devices=[gpu] * num_on_gpu + job.table.extent_devices[num_on_gpu:])
    parts = split(job, None)
    types = [device.type for device in parts.live_devices]
    assert types == sorted(types) and set(types) == {"cpu", "cuda"}
    devices = job.table.extent_devices
    for kind in ("cpu", "cuda"):
        expected = [chunk for chunk in job.chunk_order if devices[chunk.first_extent].type == kind]
        assert [chunk for chunk in parts.live if devices[chunk.first_extent].type == kind] == expected


def test_a_split_is_remembered_while_it_holds() -> None:
    saves, splitter, kept = Saves(), Splitter(), state()
    owned = frozenset({0, 1})
    first = splitter.by_owner(saves.job(kept), owned)
    assert splitter.by_owner(saves.job(kept), owned) is first
    assert splitter.all_copied(saves.job(kept)) is splitter.all_copied(saves.job(kept))
    assert splitter.by_owner(saves.job(kept), owned) is first
    kept["small"][0] = kept["small"][0].clone()  # lies elsewhere, and is the same otherwise
    assert splitter.by_owner(saves.job(kept), owned) is first
    fewer = frozenset({0})
    assert splitter.by_owner(saves.job(kept), fewer) == split(saves.job(kept), fewer)
    for change in (
        lambda: kept["small"].append(kept["small"][0].detach()),  # no other extents, and one tensor more
        lambda: kept["large"].append(torch.randn(3)),
        lambda: kept["views"].pop(),
        lambda: kept["ints"].reverse(),
    ):
        change()
        job = saves.job(kept)
        assert splitter.by_owner(job, owned) == split(job, owned)
        assert splitter.all_copied(job) == split(job, frozenset())


def test_runs() -> None:
    assert runs_of([]) == ()
    assert runs_of([3]) == (range(3, 4),)
    assert runs_of([0, 1, 2, 5, 7, 8]) == (range(3), range(5, 6), range(7, 9))


@pytest.mark.parametrize("with_inference", [False, True])
def test_each_watched_version_is_seen_and_no_other(with_inference: bool) -> None:
    tensors = [torch.zeros(2) for _ in range(9)]
    if with_inference:
        with torch.inference_mode():
            tensors[4] = torch.zeros(2)
    watched = runs_of([0, 1, 4, 7, 8])
    for i in set(range(9)) - {4}:
        watch = VersionWatch(tensors, watched)
        assert watch.first_changed(tensors) is None
        tensors[i] += 1
        assert watch.first_changed(tensors) == (i if i in (0, 1, 7, 8) else None)


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("changed", range(14))
def test_a_tensor_that_changes_while_it_is_read_fails_the_save(changed: int, is_live: bool) -> None:
    """Of the tensors that are views of one extent, any."""
    job = Saves().job(state())
    tensors = list(job.table.tensors)
    owned = frozenset(job.table.tensor_extent[2:]) if is_live else frozenset()
    parts = split(job, owned)
    job.note_versions(parts.host_copied, parts.read_in_place)
    staged = [StagedChunk(chunk, job.table) for chunk in parts.live]
    job.put_live(staged)
    if is_live:
        job.end_staging()
        assert not job.failed() and not job.future.is_staged
    tensors[changed].zero_()
    job.end_staging()
    for _ in staged:
        job.live_chunk_was_read()
    watched = parts.read_in_place if is_live else parts.host_copied
    assert job.future.is_staged
    assert isinstance(job.failure, TornSnapshotError) == any(changed in run for run in watched)


def test_the_background_begins_when_staging_ends_and_once() -> None:
    job = Saves().job(state())
    begun: list[bool] = []
    job.begin_by(lambda: begun.append(job.claim()))
    assert not begun
    job.end_staging()
    job.end_staging()
    job.begin()
    assert begun == [True]
    assert list(job.chunks()) == []


def test_an_interrupt_as_the_background_is_begun_does_not_lose_the_job() -> None:
    job = Saves().job(state())
    begun: list[bool] = []

    def begin() -> None:
        begun.append(job.claim())
        if len(begun) == 1:
            raise KeyboardInterrupt

    job.begin_by(begin)
    with pytest.raises(KeyboardInterrupt):
        job.end_staging()
    job.end_staging()
    assert begun == [True, False]
    assert list(job.chunks()) == []

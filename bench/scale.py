"""What does one commit for all ranks cost the coordinator, for 8 to 4,096 ranks with 100,000 tensors?

The coordinator is the real one; the other ranks are in its process and only say what real ones say. Measured are the
first save, at which it decides who writes what, and a later one of the same structure; and of the manifest its bytes,
of the council its requests and the bytes of its messages. No tensor has any bytes.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tidegate.board import Board
from tidegate.container import ObjectRecord
from tidegate.council import Council
from tidegate.local_part import LocalPart
from tidegate.plan_round import PlanRound
from tidegate.save import commit_attempt, made_by
from tidegate.shard_map import GlobalSpec
from tidegate.shard_plan import RankNames, RankPart, Share
from tidegate.sharded_manifest import ShardedManifest, dump_sharded
from tidegate.storage.memory import MemoryStore

from .rig import arguments, print_table, say, write_results

NUM_KINDS = 48
NUM_REPEATS = 5
DEADLINE_S = 600.0


class CountingBoard:
    """A board in memory that counts what is asked of it, and the bytes that are put up."""

    def __init__(self) -> None:
        self.num_requests: Counter[str] = Counter()
        self.put_bytes = 0
        self._board = dist.HashStore()

    def check(self, keys: list[str], /) -> bool:
        self.num_requests["check"] += 1
        return self._board.check(keys)

    def get(self, key: str, /) -> bytes:
        self.num_requests["get"] += 1
        return self._board.get(key)

    def set(self, key: str, value: bytes | str, /) -> None:
        self.num_requests["set"] += 1
        self.put_bytes += len(value)
        self._board.set(key, value)

    def delete_key(self, key: str, /) -> bool:
        self.num_requests["delete"] += 1
        return self._board.delete_key(key)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        self.num_requests["compare"] += 1
        return self._board.compare_set(key, expected, desired)


@dataclass(frozen=True, slots=True)
class Job:
    """A model over many ranks: names that all have, and how each is cut."""

    names: RankNames
    parts: list[RankPart]


def job_of(num_ranks: int, num_tensors: int, num_replicas: int) -> Job:
    """Cut tensors of NUM_KINDS shapes by rows over the ranks, each shard held by `num_replicas` of them."""
    tensors = tuple(f"model.layers.{i // 16}.block{i % 16}.weight" for i in range(num_tensors))
    class_of = tuple(i % NUM_KINDS for i in range(num_tensors))
    paths = {name: tuple(name.split(".")) for name in tensors}
    names = RankNames(tensors, class_of, (), (), paths)
    digest = names.digest()
    num_shards = num_ranks // num_replicas
    parts = []
    for rank in range(num_ranks):
        shard = rank % num_shards
        rows = [num_shards * (kind + 1) + kind % 3 for kind in range(NUM_KINDS)]
        classes = (_row_class(n, shard, num_shards, 16 * (kind + 1)) for kind, n in enumerate(rows))
        parts.append(RankPart(digest, tuple(classes)))
    return Job(names, parts)


def _row_class(num_rows: int, shard: int, num_shards: int, width: int) -> tuple[GlobalSpec, tuple]:
    """As torch.chunk does: the last shards may be shorter, or empty."""
    each = -(-num_rows // num_shards)
    start = min(num_rows, shard * each)
    return GlobalSpec("bfloat16", (num_rows, width)), ((start, 0), (min(each, num_rows - start), width))


def measure(num_ranks: int, num_tensors: int, num_replicas: int) -> dict[str, float | int]:
    """Carry out two saves on the coordinator."""
    job = job_of(num_ranks, num_tensors, num_replicas)
    board = CountingBoard()
    ranks = [Council(as_board(board), rank, num_ranks) for rank in range(num_ranks)]
    rounds = PlanRound(ranks[0])
    store = MemoryStore()
    local = LocalPart(job.parts[0], job.names)
    (first_s, first_cpu_s), text = one_save(ranks, rounds, store, job, local, step=1)
    first_board_bytes, board.put_bytes = board.put_bytes, 0
    board.num_requests.clear()
    (again_s, again_cpu_s), _ = one_save(ranks, rounds, store, job, local, step=2)
    return {
        "num_ranks": num_ranks,
        "num_replicas": num_replicas,
        "num_shards": sum(map(len, (layout.offsets for _, _, layout in rounds.shards.tensors()))),
        "first_s": first_s,
        "first_cpu_s": first_cpu_s,
        "again_s": again_s,
        "again_cpu_s": again_cpu_s,
        "manifest_bytes": len(text),
        "first_board_bytes": first_board_bytes,
        "again_board_bytes": board.put_bytes,
        "requests": sum(board.num_requests.values()),
        "plan_message_bytes": len(json.dumps(job.parts[-1].to_json())),
    }


def median_of(runs: Sequence[dict[str, float | int]]) -> dict[str, float | int]:
    """Return the run whose first save took the median time, and between what the others lay."""
    ordered = sorted(runs, key=lambda run: run["first_s"])
    bounds = {"first_min_s": ordered[0]["first_s"], "first_max_s": ordered[-1]["first_s"]}
    return {**ordered[len(ordered) // 2], **bounds}


class StopWatch:
    """Adds up the time between `start` and `stop`, by the clock and of this process's CPUs."""

    def __init__(self) -> None:
        self.spent_s = self.spent_cpu_s = 0.0

    def start(self) -> None:
        """Begin to count."""
        self._began = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """Add what has passed since."""
        self.spent_s += time.perf_counter() - self._began[0]
        self.spent_cpu_s += time.process_time() - self._began[1]


def as_board(board: CountingBoard) -> Board:
    """Check that it is one."""
    return board


def one_save(
    ranks: Sequence[Council], rounds: PlanRound, store: MemoryStore, job: Job, local: LocalPart, step: int
) -> tuple[tuple[float, float], bytes]:
    """Return how long the coordinator works on a save, by the clock and in CPU time, and the manifest."""
    coordinator, topic, watch = ranks[0], f"save {step}", StopWatch()
    for rank, part in zip(ranks[1:], job.parts[1:], strict=True):
        told = part.to_json() if step == 1 else None
        rank.say(f"{topic}/plan", {"step": step, "lineage": "", "digest": part.digest(), "part": told})
    watch.start()
    deadline_s = time.monotonic() + DEADLINE_S
    _, attempt = rounds.run(f"{topic}/plan", step, "", local, Share() if step > 1 else None, deadline_s, deadline_s)
    watch.stop()
    for number, rank in enumerate(ranks):
        key = f"step-{step:010d}/{attempt}/rank-{number:05d}.tg"
        node = {"object": [key, 1 << 30, f"{number:016x}"], "num_items": rounds.num_items[number], "raw_bytes": 1}
        rank.say(f"{topic}/written", node)
    watch.start()
    said = coordinator.gather(f"{topic}/written", deadline_s)
    objects = tuple(ObjectRecord(node["object"][0], node["object"][1], int(node["object"][2], 16)) for node in said)
    manifest = ShardedManifest(step, attempt, made_by(), {}, objects, rounds.shards)
    text = dump_sharded(manifest, rounds.shards_text)
    commit_attempt(store, step, attempt, text, None)
    coordinator.reply(f"{topic}/written", dict.fromkeys(range(len(ranks)), "committed"))
    watch.stop()
    return (watch.spent_s, watch.spent_cpu_s), text


def main(arguments_given: Sequence[str] | None = None) -> Path:
    """Run it, and write results/scale.json."""
    args = arguments(__doc__).parse_args(arguments_given)
    sizes, num_tensors = ((8, 16), 200) if args.tiny else ((8, 64, 512, 4096), 100_000)
    found = []
    for num_ranks in sizes:
        for num_replicas in (1, 8):
            if num_ranks > num_replicas:
                say(f"{num_ranks} ranks, {num_replicas} copies")
                num_repeats = 1 if args.tiny else NUM_REPEATS
                runs = [measure(num_ranks, num_tensors, num_replicas) for _ in range(num_repeats)]
                found.append(median_of(runs))
    print_table(list(found[0]), [list(row.values()) for row in found])
    results: dict[str, object] = {"num_tensors": num_tensors, "num_kinds": NUM_KINDS, "runs": found}
    return write_results("scale-tiny" if args.tiny else "scale", results)


if __name__ == "__main__":
    main()

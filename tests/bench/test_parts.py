"""What the benchmarks are made of: the time budget, the machine line, the plots, the models."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from bench import plots, rig
from bench.codec_tables import HEAD, HEAD_WHOLE, Cell, Own, plot, plot_whole, rows_of, summary
from bench.coding import chunks_of
from bench.counting import count_for, count_until
from bench.models import Training, num_bytes, num_zeros
from bench.networks import SIZES, DenseLM, Experts, MoELM, Size
from bench.nvcomp_alone import exponent_plane
from bench.rig import print_table
from bench.text import read_words
from bench.turns import quartiles, round_of
from tidegate.codec.words import WordType
from tidegate.report import Span

TINY = Size(64, 1, num_words=1 << 12, num_experts=8, expert_width=16)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(rig.time, "perf_counter", clock)
    yield clock


def test_a_repeat_stops_when_its_time_is_up_but_not_before_three(clock: Clock) -> None:
    def work() -> None:
        clock.now_s += 2.0

    def run(seconds: float | None, num: int) -> int:
        return len(rig.repeat(work, num=num, warm_up=0, budget=rig.TimeBudget(seconds, clock.now_s)).values_s)

    assert run(None, 7) == 7
    assert run(9.0, 20) == 4
    assert run(5.0, 20) == 3, "the third overruns the budget by less than half of it"
    assert run(1.0, 20) == 1, "the first is always done"


def test_a_budget_is_shared_among_what_is_to_come(clock: Clock) -> None:
    budget = rig.TimeBudget(10.0, clock.now_s)
    clock.now_s += 4.0
    assert budget.left_s == 6.0
    assert budget.share(3).seconds == 2.0
    assert rig.TimeBudget(None, 0.0).share(3).seconds is None
    clock.now_s += 100.0
    assert budget.left_s == 0.0


def test_interleave_takes_turns(clock: Clock) -> None:
    order = []

    def work(name: str, took_s: float) -> None:
        order.append(name)
        clock.now_s += took_s

    works = {"a": lambda: work("a", 1.0), "b": lambda: work("b", 3.0)}
    times = rig.interleave(works, num=9, warm_up=1, budget=rig.TimeBudget(17.0, 0.0))
    assert order == ["a", "b"] * (len(order) // 2)
    assert times["b"].median_s == 3.0
    assert len(times["a"].values_s) == len(times["b"].values_s) == 3


def test_the_filesystem_of_a_folder_is_named(tmp_path: Path) -> None:
    assert rig.filesystem_of(Path("/proc/self/fd")) == "proc on /proc"
    here = rig.filesystem_of(tmp_path / "not" / "there")
    kind, _, point = here.partition(" on ")
    assert kind != "unknown"
    assert os.path.ismount(point)


def test_results_name_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    path = rig.write_results("x", {"a": 1}, checkpoints=Path("/proc"))
    assert path == tmp_path / "x.json"
    text = path.read_text()
    assert '"filesystem": "proc on /proc"' in text
    assert '"gds"' in text


def test_plots_are_drawn(tmp_path: Path) -> None:
    beside = plots.beside(tmp_path / "r.json", "x")
    assert beside == tmp_path / "r-x.png"
    series = {"ans": [1.2, 1.3], "raw": [None, 1.0]}
    spans = [Span(0, "stage", 0.0, 0.1), Span(0, "encode", 0.1, 0.3), Span(0, "write", 0.3, 0.35)]
    rows = [[0, "encode", 0.0, 0.1], [0, "new stage", 0.1, 0.2]]
    drawn = [
        plots.bars(tmp_path / "bars.png", "How long?", {"a": 1.0, "b": 20.0}, unit="ms", log=True, limits={"most": 5}),
        plots.grouped_bars(tmp_path / "g.png", "Which?", ["m", "v"], series, unit="ratio"),
        plots.timeline(tmp_path / "t.png", "When?", spans, stall_s=0.2),
        plots.timeline(tmp_path / "t2.png", "When?", rows),
        plots.lines(tmp_path / "l.png", "Where?", {"a": ([1, 2], [3, 4])}, x_unit="s", y_unit="GB", limits={"most": 5}),
    ]
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_experts_do_what_one_expert_after_the_other_would() -> None:
    experts = Experts(Size(64, 1, num_experts=4, expert_width=16))
    x = torch.randn(12, 64)  # 12 places an expert: nothing is dropped
    share, expert = experts.router(x).softmax(dim=-1).max(dim=-1)
    rows = [functional.gelu(row @ experts.up[i]) @ experts.down[i] for row, i in zip(x, expert.tolist(), strict=True)]
    torch.testing.assert_close(experts(x), torch.stack(rows) * share.unsqueeze(-1))


def test_a_token_that_finds_no_place_is_dropped_and_an_idle_expert_has_no_gradient() -> None:
    experts = Experts(Size(64, 1, num_experts=8, expert_width=16))
    x = torch.randn(1, 64).expand(16, 64)  # all go to one expert, which has 8 places
    out = experts(x)
    assert torch.count_nonzero(out.abs().sum(dim=-1)).item() == 8
    out.square().sum().backward()
    idle = [torch.count_nonzero(p.grad).item() == 0 for p in experts.up if p.grad is not None]
    assert sorted(idle) == [False] + [True] * 7


@pytest.mark.parametrize("size", [SIZES["dense-tiny"], TINY], ids=["dense", "moe"])
def test_a_training_state_has_its_components(size: Size) -> None:
    training = Training(size, torch.device("cpu"), keep_gradients=True)
    training.train(2, batch=1)
    roles = training.components()
    assert list(roles) == ["weights", "master", "m", "v", "gradients"]
    kinds = {role: {tensor.dtype for tensor in tensors} for role, tensors in roles.items()}
    assert kinds["weights"] == kinds["gradients"] == {torch.bfloat16}
    assert kinds["master"] == kinds["m"] == kinds["v"] == {torch.float32}
    assert len({tuple(t.shape for t in tensors) for tensors in roles.values()}) == 1
    assert num_bytes(t for role in ("weights", "master", "m", "v") for t in roles[role]) == 14 * training.num_parameters
    for weight, master in zip(roles["weights"], roles["master"], strict=True):
        assert weight.view(torch.int16).equal(master.bfloat16().view(torch.int16))
    if size.num_experts:
        assert num_zeros(roles["v"]) > 0.1 * training.num_parameters, "rows of words that did not occur"


def test_sizes_are_what_they_are_said_to_be() -> None:
    def count(name: str) -> tuple[int, int]:
        with torch.device("meta"):
            model = (MoELM if SIZES[name].num_experts else DenseLM)(SIZES[name])
        shapes = [p.shape for p in model.parameters()]
        return sum(shape.numel() for shape in shapes), len(shapes)

    assert count("dense")[0] >= 300e6
    assert count("moe")[0] >= 300e6
    parameters, tensors = count("large")
    assert 14 * parameters >= 8e9
    assert 5 * tensors >= 2000


def cell(role: str, codec: str, lanes_bytes_per_s: float) -> Cell:
    times: dict[str, float | int] = {"median_s": 1.0, "min_s": 1.0, "max_s": 1.0, "n": 1}
    return Cell(
        model="dense",
        component=role,
        codec=codec,
        zeros=0.0,
        raw_bytes=300,
        stored_bytes=200,
        ratio=1.5,
        encode_bytes_per_s=80e9,
        lanes_bytes_per_s=lanes_bytes_per_s,
        decode_bytes_per_s=180e9,
        encode_s=times,
        lanes_s=times,
        decode_s=times,
        num_raw_frames=0,
        refused_blocks=0,
        own=Own(100e9, 200e9, 1.5, 1) if codec == "ans" else None,
        plain=None,
    )


def test_the_table_and_the_plots_of_the_codecs(tmp_path: Path) -> None:
    cells = [cell(role, codec, speed) for role, speed in (("m", 98e9), ("v", 90e9)) for codec in ("ans", "lz4")]
    found = summary({"dense": {"failures": []}}, cells)
    assert found["exact"]
    assert found["ans"] == {"worst_ours_of_own": 0.9, "best_ours_of_own": 0.98}
    assert "zstd" not in found
    print_table(HEAD, [cell.cells() for cell in cells])
    saved = {"ans": {"ratio": 1.2}, "auto": {"ratio": 1.1}}
    models: dict[str, dict[str, object]] = {
        "dense": {"as_nvidia_counts": {"ans": 1.25, "lz4": 1.0}, "saved": saved},
    }
    rows = list(rows_of(models))
    assert rows[0] == ("dense", "ans", "1.2500", 1.25, "1.2000")
    assert rows[2] == ("dense", "auto", "", "", "1.1000")
    print_table(HEAD_WHOLE, rows)
    plot(tmp_path / "codecs.json", "dense", cells)
    plot_whole(tmp_path / "codecs.json", models)
    names = {"codecs-dense-ratio.png", "codecs-dense-encode.png", "codecs-dense-decode.png", "codecs-whole.png"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_words_are_numbers_below_the_vocabulary() -> None:
    words = read_words(1000, limit_bytes=100_000)
    assert words.dtype == torch.int32
    assert 0 <= words.min() < words.max() < 1000
    assert len(words) > 10_000


def test_chunks_lie_one_after_another() -> None:
    tensors = [torch.randn(3, 5), torch.randn(7), torch.randn(())]
    chunks = chunks_of(tensors, 64)
    assert [chunk.numel() for chunk in chunks] == [64, 28]
    assert b"".join(c.numpy().tobytes() for c in chunks) == b"".join(t.numpy().tobytes() for t in tensors)


@pytest.mark.parametrize("word", [WordType.BF16, WordType.F16, WordType.F32])
def test_the_exponent_plane_is_the_top_byte_once_the_sign_is_at_the_bottom(word: WordType) -> None:
    raw = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    values = raw.view(f"<u{word.itemsize}")
    bits = 8 * word.itemsize
    rotated = (values << 1) | (values >> (bits - 1))
    expected = (rotated >> (bits - 8)).astype(np.uint8)
    assert exponent_plane(torch.from_numpy(raw), word).numpy().tobytes() == expected.tobytes()


def test_a_loop_that_waits_for_the_lock_is_told_from_one_that_runs() -> None:
    """The lock is held by a C call that does not give it up, as PyDLL's do not; no clock of a core matters."""
    usleep = ctypes.PyDLL(None).usleep
    is_over, turns = threading.Event(), 10

    def hold() -> None:
        for _ in range(turns):
            usleep(20_000)
        is_over.set()

    alone = count_for(0.2)
    holder = threading.Thread(target=hold)
    holder.start()
    counted = count_until(is_over.is_set)
    holder.join()
    assert alone.lock < 0.2
    assert counted.lock > 0.5 > alone.lock + 0.2
    assert counted.wall_s >= turns * 0.02 * 0.9
    both = round_of(alone, counted, alone, [1.0])
    assert both.lock == pytest.approx(counted.lock - alone.lock)
    assert both.rate < 0.6


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
def test_quartiles_lie_on_both_sides_of_the_median(values: list[float]) -> None:
    assert quartiles(values) == ((3.0, 3.0) if len(values) == 1 else (2.0, 4.0))

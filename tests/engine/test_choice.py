"""The codec that `auto` chooses: as good as the best of all assignments, but for one chunk."""

from __future__ import annotations

import itertools
import random

import pytest

from tidegate.choice import FIRST_GUESS_BYTES_PER_S, WORTH_BINDING, CodecChooser, Option, Trial, assign

GB = 1e9
CHUNK = 64 << 20
WEIGHTS = ("cuda:0", "bf16", "")
MOMENTS = ("cuda:0", "f32", "exp_avg_sq")
TRIALS = {
    WEIGHTS: {"raw": Trial(2500 * GB, 1.0), "ans": Trial(290 * GB, 1.5), "zstd": Trial(11 * GB, 1.43)},
    MOMENTS: {"raw": Trial(2500 * GB, 1.0), "ans": Trial(290 * GB, 1.4), "zstd": Trial(15 * GB, 3.0)},
}


def save_s(chunks: list[list[Option]], codecs: list[str], rate: float) -> float:
    chosen = [next(o for o in options if o.codec == codec) for options, codec in zip(chunks, codecs, strict=True)]
    return max(sum(o.encode_s for o in chosen), sum(o.stored_bytes for o in chosen) / rate)


@pytest.mark.parametrize("seed", range(30))
def test_no_assignment_is_better_by_more_than_a_chunk(seed: int) -> None:
    draw = random.Random(seed)
    names = ("raw", "ans", "zstd")
    chunks = [[Option(n, draw.uniform(0.1, 2.0), draw.uniform(1, 10)) for n in names] for _ in range(6)]
    rate = draw.choice([0.5, 2.0, 10.0, 100.0])
    best = min(save_s(chunks, list(codecs), rate) for codecs in itertools.product(names, repeat=6))
    slowest_s = [max(o.encode_s for o in chunk) + max(o.stored_bytes for o in chunk) / rate for chunk in chunks]
    assert save_s(chunks, assign(chunks, rate), rate) <= best + max(slowest_s)


@pytest.mark.parametrize("rate", [1 * GB, 5 * GB, 10 * GB, 25 * GB, 50 * GB, 1000 * GB])
def test_auto_is_never_worse_than_one_codec_for_all(rate: float) -> None:
    chooser = CodecChooser(("ans", "zstd", "raw"), store_bytes_per_s=rate)
    for group, trials in TRIALS.items():
        chooser.learn(group, trials)
    groups = [(WEIGHTS if i % 7 == 0 else MOMENTS, CHUNK) for i in range(128)]
    options = [[Option(c, CHUNK / t.bytes_per_s, CHUNK / t.ratio) for c, t in TRIALS[g].items()] for g, _ in groups]
    chosen = save_s(options, chooser.choose(groups), rate)
    fixed = min(save_s(options, [codec] * len(groups), rate) for codec in chooser.candidates)
    assert chosen <= fixed * 1.001


def test_a_slow_store_gets_the_smallest_frames() -> None:
    chooser = CodecChooser(("ans", "zstd", "raw"), store_bytes_per_s=0.1 * GB)
    for group, trials in TRIALS.items():
        chooser.learn(group, trials)
    assert chooser.choose([(WEIGHTS, CHUNK), (MOMENTS, CHUNK)]) == ["ans", "zstd"]


def test_equal_chunks_that_share_two_codecs_are_spread_evenly() -> None:
    chooser = CodecChooser(("ans", "zstd", "raw"), store_bytes_per_s=8 * GB)
    chooser.learn(MOMENTS, TRIALS[MOMENTS])
    chosen = chooser.choose([(MOMENTS, CHUNK)] * 100)
    num_zstd = chosen.count("zstd")
    assert 0 < num_zstd < 100
    for half in (chosen[:50], chosen[50:]):
        assert abs(half.count("zstd") - num_zstd / 2) <= 3


def test_a_group_is_tried_once_and_again_after_some_saves() -> None:
    chooser = CodecChooser(("ans", "zstd"))
    assert chooser.needs_trial(WEIGHTS)
    chooser.learn(WEIGHTS, {"ans": Trial(290 * GB, 1.5), "zstd": Trial(11 * GB, 1.43)})
    saves = 0
    while not chooser.needs_trial(WEIGHTS):
        chooser.end_save()
        saves += 1
        assert saves < 100
    assert saves > 1


def test_the_store_is_guessed_until_it_has_been_seen() -> None:
    chooser = CodecChooser(("ans", "raw"))
    chooser.learn_store(0, 0.0)
    assert chooser.store_bytes_per_s is None
    chooser.learn(WEIGHTS, {"ans": Trial(290 * GB, 1.5), "raw": Trial(2500 * GB, 1.0)})
    assert chooser.choose([(WEIGHTS, CHUNK)]) == ["ans"]
    assert f"{FIRST_GUESS_BYTES_PER_S / GB:.3g} GB/s" in chooser.note({WEIGHTS: {"ans": 1}})
    chooser.learn_store(int(10 * GB), 1.0)
    assert chooser.store_bytes_per_s == 10 * GB


def test_the_note_gives_choice_and_figures() -> None:
    chooser = CodecChooser(("ans", "zstd"), store_bytes_per_s=2 * GB)
    chooser.learn(MOMENTS, {"ans": Trial(290 * GB, 1.4), "zstd": Trial(15 * GB, 3.0)})
    note = chooser.note({MOMENTS: {"zstd": 9, "ans": 1}})
    assert note == (
        "auto, for a store of 2 GB/s: cuda:0 f32 exp_avg_sq: zstd × 9 + ans × 1 (ans 1.400 at 290 GB/s, zstd 3.000 at "
        "15 GB/s)"
    )


def test_only_one_group_is_tried_again_in_a_save() -> None:
    chooser = CodecChooser(("ans", "zstd"))
    for group, trials in TRIALS.items():
        chooser.learn(group, trials)
    for _ in range(100):
        chooser.end_save()
    assert chooser.needs_trial(WEIGHTS)
    assert chooser.needs_trial(MOMENTS)
    assert not chooser.needs_trial(MOMENTS, again=False)
    assert chooser.needs_trial(("cuda:0", "u8", ""), again=False), "nothing is known of this one"


def test_a_choice_holds_while_the_figures_are_about_the_same() -> None:
    chooser = CodecChooser(("ans", "zstd"), store_bytes_per_s=5 * GB)
    chooser.learn(WEIGHTS, TRIALS[WEIGHTS])
    before = chooser.figures
    chooser.store_bytes_per_s = 5.4 * GB
    assert before.is_like(chooser.figures)
    chooser.store_bytes_per_s = 6 * GB
    assert not before.is_like(chooser.figures)
    chooser.store_bytes_per_s = 5 * GB
    chooser.learn(MOMENTS, TRIALS[MOMENTS])
    assert not before.is_like(chooser.figures)


RANS_TRIALS = {
    WEIGHTS: {"rans": Trial(900 * GB, 1.50), "ans": Trial(290 * GB, 1.51), "zstd": Trial(11 * GB, 1.43)},
    MOMENTS: {"rans": Trial(1000 * GB, 1.2), "ans": Trial(290 * GB, 1.2), "zstd": Trial(15 * GB, 3.0)},
}


@pytest.mark.parametrize("rate", [0.1 * GB, 2 * GB, 10 * GB, 50 * GB, 1000 * GB])
def test_a_codec_that_binds_is_not_chosen_for_little(rate: float) -> None:
    """One per cent of the bytes of the weights are not worth a checkpoint that opens on some machines only."""
    groups = [(WEIGHTS if i % 7 == 0 else MOMENTS, CHUNK) for i in range(64)]
    bound = CodecChooser(("rans", "zstd", "ans"), store_bytes_per_s=rate, bound=frozenset({"ans"}))
    unbound = CodecChooser(("rans", "zstd", "ans"), store_bytes_per_s=rate)
    for chooser in (bound, unbound):
        for group, trials in RANS_TRIALS.items():
            chooser.learn(group, trials)
    assert "ans" not in bound.choose(groups)
    if rate == 0.1 * GB:
        assert "ans" in unbound.choose(groups), "without the rule it is chosen"


def test_a_codec_that_binds_is_chosen_where_the_save_gains_clearly() -> None:
    chooser = CodecChooser(("rans", "zstd", "ans"), store_bytes_per_s=1 * GB, bound=frozenset({"ans"}))
    chooser.learn(WEIGHTS, {"rans": Trial(900 * GB, 1.2), "ans": Trial(290 * GB, 1.5), "zstd": Trial(11 * GB, 1.1)})
    assert chooser.choose([(WEIGHTS, CHUNK)] * 4) == ["ans"] * 4
    assert 1 - WORTH_BINDING > 1.2 / 1.5


def test_a_chunk_that_has_only_such_codecs_gets_one() -> None:
    chooser = CodecChooser(("ans", "bitcomp"), store_bytes_per_s=1 * GB, bound=frozenset({"ans", "bitcomp"}))
    chooser.learn(WEIGHTS, {"ans": Trial(290 * GB, 1.5), "bitcomp": Trial(100 * GB, 1.1)})
    assert chooser.choose([(WEIGHTS, CHUNK)]) == ["ans"]

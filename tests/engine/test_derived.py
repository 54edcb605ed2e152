"""Tensors that follow from others are not stored, come back bit for bit, and are stored once they do not follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tidegate
from tests.contract.codec_contract import CONTENTS
from tests.kit.bits import assert_same_bits
from tests.kit.forging import edit_manifest, record_of
from tests.kit.states import SmallTraining, odd_values, save_while_training
from tidegate.cli import main as run_cli
from tidegate.codec.words import WORD_OF_DTYPE, WordType
from tidegate.delta import DeltaPolicy
from tidegate.pairs import DeriveOption
from tidegate.rules import BF16_OF_F32, follow
from tidegate.storage.memory import MemoryStore
from tidegate.tensors import quiet_complex32

CHUNK = 1 << 16
NUMEL = 100_003
DTYPES = [dtype for dtype in WORD_OF_DTYPE if dtype != torch.bool]
ROUNDED = {"bf16-of-f32": torch.bfloat16, "f16-of-f32": torch.float16}


def pair(dtype: torch.dtype, device: torch.device | str = "cpu", numel: int = NUMEL) -> dict[str, Any]:
    """A master and its rounding, and something else of the same length."""
    master = torch.randn(numel, device=device)
    return {"w": master.to(dtype), "m": torch.randn(numel, device=device), "master": master}


def save(state: object, root: Path | MemoryStore, *, chunk_bytes: int = CHUNK, **options: Any) -> tidegate.SaveReport:
    with tidegate.CheckpointEngine(root, chunk_bytes=chunk_bytes, **options) as engine:
        engine.save_async(state, step=0)
        report = engine.wait()
    assert report is not None
    return report


def load(root: Path | MemoryStore, **options: Any) -> Any:
    with tidegate.CheckpointEngine(root) as engine:
        return engine.load(**options)


def derived_bytes(root: Path | MemoryStore, step: int = 0) -> dict[str, int]:
    """Bytes that are not stored, by rule."""
    if isinstance(root, MemoryStore):
        key = next(stat.key for stat in root.list() if stat.key.endswith("manifest.json"))
        fields = json.loads(root.read_all(key, limit_bytes=1 << 24))
    else:
        fields = json.loads((root / record_of(root, step).manifest_key).read_text())
    assert fields["features"] == (["derived"] if "derived" in fields else [])
    rows = {item["rule"]: item["chunks"] for item in fields.get("derived", [])}
    return {rule: sum(fields["chunks"][row[0]][3] for row in found) for rule, found in rows.items()}


@pytest.mark.parametrize("chunk_bytes", [CHUNK, 64 << 20])
@pytest.mark.parametrize("rule", ROUNDED)
def test_a_rounding_is_not_stored(tmp_path: Path, device: torch.device, rule: str, chunk_bytes: int) -> None:
    state = pair(ROUNDED[rule], device)
    report = save(state, tmp_path, chunk_bytes=chunk_bytes)
    assert derived_bytes(tmp_path) == {rule: 2 * NUMEL}
    assert report.derived_bytes == 2 * NUMEL
    assert_same_bits(load(tmp_path, map_location=str(device)), state)
    assert_same_bits(load(tmp_path, part="w", map_location=str(device)), state["w"])
    assert_same_bits(load(tmp_path, part=["m", "w"]), {name: state[name] for name in ("m", "w")}, device=False)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(tmp_path, into=into)
    assert_same_bits(into, state)
    strided = torch.zeros(NUMEL, 2, dtype=ROUNDED[rule], device=device)[:, 0]
    load(tmp_path, part="w", into=strided)
    assert_same_bits(strided.contiguous(), state["w"])


def test_small_tensors_share_derived_chunks(tmp_path: Path) -> None:
    masters = [torch.randn(1000 + 7 * i) for i in range(100)]
    state = {"w": [m.bfloat16() for m in masters], "b": torch.zeros(3), "masters": masters}
    save(state, tmp_path)
    assert derived_bytes(tmp_path) == {"bf16-of-f32": sum(2 * m.numel() for m in masters)}
    assert_same_bits(load(tmp_path), state)
    assert_same_bits(load(tmp_path, part="w[41]"), state["w"][41])


@pytest.mark.parametrize("kind", ["one bit", "nan", "all odd"])
@pytest.mark.parametrize("rule", ROUNDED)
def test_one_bit_that_does_not_follow_is_stored(tmp_path: Path, device: torch.device, rule: str, kind: str) -> None:
    """Only the chunk with the bit is stored."""
    state = pair(ROUNDED[rule], device)
    if kind == "one bit":
        state["w"].view(torch.int16)[50_001] ^= 1
    elif kind == "nan":
        for tensor in (state["master"], state["w"]):
            tensor[50_001] = torch.nan
            tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)[50_001] ^= 1
    else:
        state["w"][50_001:60_000] = odd_values(ROUNDED[rule], 9999, device)
    save(state, tmp_path, derive={"w": "master"})
    assert derived_bytes(tmp_path) == {rule: 2 * NUMEL - CHUNK}
    assert_same_bits(load(tmp_path, map_location=str(device)), state)


def test_odd_values_follow_where_the_rule_gives_them(tmp_path: Path) -> None:
    """Infinities, zeros of both signs and denormals round as numbers do; a NaN only to what the rule says."""
    source = odd_values(torch.float32, NUMEL)
    source[torch.isnan(source)] = -0.0
    save(
        {"w": source.bfloat16(), "h": source.half(), "master": source}, tmp_path, derive={"w": "master", "h": "master"}
    )
    assert derived_bytes(tmp_path) == {"bf16-of-f32": 2 * NUMEL, "f16-of-f32": 2 * NUMEL}
    with_nans = {"w": odd_values(torch.bfloat16, NUMEL), "master": odd_values(torch.float32, NUMEL)}
    store = MemoryStore()
    save(with_nans, store, derive={"w": "master"})
    assert derived_bytes(store) == {}
    assert_same_bits(load(store), with_nans)


@pytest.mark.parametrize(
    ("content", "codec"),
    [
        *((content, "zstd") for content in CONTENTS),
        *(("nan-payloads", c) for c in ("rans", "deflate", "raw", "planes")),
    ],
)
def test_every_pattern_dtype_and_codec(content: str, codec: str) -> None:
    """Of each dtype a tensor twice, and of each pattern of fp32 both roundings: bit for bit, derived or not."""
    rng = np.random.default_rng(3)
    master = torch.from_numpy(CONTENTS[content](WordType.F32, NUMEL, rng).copy())
    rounded = torch.empty(2 * NUMEL, dtype=torch.uint8)
    follow(BF16_OF_F32, master, rounded)
    state: dict[str, Any] = {
        "master": master.view(torch.float32),
        "bf16": rounded.view(torch.bfloat16),
        "f16": master.view(torch.float32).half(),
        "cast": master.view(torch.float32).bfloat16(),
    }
    pairs = dict.fromkeys(("bf16", "f16", "cast"), "master")
    for dtype in DTYPES:
        name, word = str(dtype).removeprefix("torch."), WORD_OF_DTYPE[dtype]
        octets = torch.from_numpy(CONTENTS[content](word, (1 << 16) // word.itemsize, rng).copy())
        with quiet_complex32():
            state[name], state[f"{name}_again"] = octets.view(dtype), octets.clone().view(dtype)
        pairs[f"{name}_again"] = name
    store = MemoryStore()
    save(state, store, codec=codec, derive=pairs, delta=DeltaPolicy())
    found = derived_bytes(store)
    assert found["same"] == len(DTYPES) << 16
    assert found["bf16-of-f32"] >= 2 * NUMEL, "by the rule, NaNs too"
    assert ("f16-of-f32" in found) == (not state["master"].isnan().any())
    assert_same_bits(load(store), state)
    assert_same_bits(load(store, part="bf16"), state["bf16"])


def test_what_is_there_twice_is_stored_once(tmp_path: Path, device: torch.device) -> None:
    first = torch.randint(0, 1 << 30, (NUMEL,), device=device)
    state = {"a": first, "b": first.clone(), "c": first.clone(), "d": first.float()}
    report = save(state, tmp_path, codec="zstd")  # auto may leave so small a state as it is
    assert derived_bytes(tmp_path) == {"same": 16 * NUMEL}
    assert report.stored_bytes < 12.5 * NUMEL
    back = load(tmp_path, map_location=str(device))
    assert_same_bits(back, state)
    back["b"].zero_()
    assert_same_bits(back["c"], state["c"]), "they share no memory"


def test_two_alike_roundings_follow_from_one_master(tmp_path: Path) -> None:
    state = pair(torch.bfloat16)
    state |= {"ema": state["w"].clone(), "copy": state["master"].clone()}
    save(state, tmp_path)
    assert derived_bytes(tmp_path) == {"bf16-of-f32": 4 * NUMEL, "same": 4 * NUMEL}
    assert_same_bits(load(tmp_path), state)
    assert_same_bits(load(tmp_path, part="ema"), state["ema"])


def test_the_pair_with_the_like_name_is_taken(tmp_path: Path) -> None:
    """All norms of a young model are ones, so values alone do not tell whose master is whose."""
    names = [f"layers.{i}" for i in range(3)]
    ones = {name: torch.ones(40_000) for name in names}
    state = {"model": {name: ones[name].bfloat16() for name in names}, "master": ones}
    with tidegate.CheckpointEngine(tmp_path, chunk_bytes=CHUNK) as engine:
        for step in range(3):
            engine.save_async(state, step=step)
            report = engine.wait()
            assert report is not None
            assert sum(total.raw_bytes for total in report.by_codec.values()) == 3 * 160_000, "none of bf16 is stored"
            for i, name in enumerate(names):
                ones[name] += i + torch.rand(40_000)
                state["model"][name].copy_(ones[name])


@pytest.mark.parametrize("named", [["weights"], ["weights", "masters"], []])
def test_norms_of_a_young_model_have_their_own_masters(tmp_path: Path, device: torch.device, named: list[str]) -> None:
    """Where few values have moved, and none of those that are looked at, only names or the order tell."""
    masters = [torch.ones(1000, device=device) for _ in range(40)]
    weights = [master.bfloat16() for master in masters]
    moments = [torch.zeros(1000, device=device) for _ in range(40)]
    state: dict[str, Any] = {"masters": masters, "exp_avg": moments, "weights": weights}
    state |= {kind: {f"layers.{i}.norm": x for i, x in enumerate(state[kind])} for kind in named}
    with tidegate.CheckpointEngine(tmp_path) as engine:
        for step in range(4):
            engine.save_async(state, step=step).result()
            assert derived_bytes(tmp_path, step) == {"bf16-of-f32": 80_000}, f"step {step}"
            masters[3 * step][7] += 1 + step
            weights[3 * step].copy_(masters[3 * step])


def test_a_wrong_pair_costs_its_chunk_once(tmp_path: Path, device: torch.device) -> None:
    """A frozen tensor looks like the rounding of something else, and is none."""
    masters = [torch.randn(40_000, device=device), torch.ones(1000, device=device)]
    weights = [master.bfloat16() for master in masters]
    weights[1][7] = 2
    with tidegate.CheckpointEngine(tmp_path) as engine:
        for step in range(3):
            engine.save_async({"masters": masters, "weights": weights}, step=step).result()
            assert derived_bytes(tmp_path, step) == ({} if step == 0 else {"bf16-of-f32": 80_000}), f"step {step}"


def test_a_pair_that_fails_is_looked_for_again(tmp_path: Path) -> None:
    """The rounding of one master at first, later that of another: stored in full once, then derived again."""
    masters = [torch.randn(NUMEL) for _ in range(2)]
    weight = masters[0].bfloat16()
    stored = []
    with tidegate.CheckpointEngine(tmp_path, chunk_bytes=1 << 20) as engine:
        for step, source in enumerate((0, 0, 1, 1, 1)):
            weight.copy_(masters[source])
            state = {"w": weight, "masters": masters}
            engine.save_async(state, step=step)
            report = engine.wait()
            assert report is not None
            stored.append(sum(total.raw_bytes for total in report.by_codec.values()))
            assert_same_bits(engine.load(step), state)
    assert [size - 8 * NUMEL for size in stored] == [0, 0, 2 * NUMEL, 0, 0]


@pytest.mark.parametrize("snapshot", ["auto", "host", "lazy", pytest.param("device", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("derive", [True, False])
def test_training_under_saves(tmp_path: Path, device: torch.device, snapshot: Any, derive: bool) -> None:
    if snapshot == "device" and device.type == "cpu":
        pytest.skip("there is no device to copy on")
    training = SmallTraining(device, fused=False, width=601)
    with tidegate.CheckpointEngine(tmp_path, chunk_bytes=CHUNK, snapshot=snapshot, derive=derive) as engine:
        engine.attach(training.optimizer)
        expected = save_while_training(engine, training, 4)
        for step, state in enumerate(expected):
            assert_same_bits(engine.load(step, map_location=str(device)), state, device=False)


def test_a_tight_budget_is_enough(tmp_path: Path) -> None:
    masters = [torch.randn(300_000) for _ in range(4)]
    state = {"w": [m.bfloat16() for m in masters], "masters": masters}
    save(state, tmp_path, chunk_bytes=1 << 20, host_budget_bytes=4 << 20)
    assert derived_bytes(tmp_path) == {"bf16-of-f32": 8 * 300_000}
    assert_same_bits(load(tmp_path), state)


@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_many_sources_of_one_chunk(tmp_path: Path, device: torch.device, codec: str) -> None:
    """Runs of sources with and without targets, of several rules and lengths; new, in place, on the CPU, in part."""
    masters = [torch.randn(40_000 + 1_001 * i, device=device) for i in range(24)]
    weights = {i: m.half() if i % 7 == 3 else m.bfloat16() for i, m in enumerate(masters) if i % 5}
    state = {"w": weights, "masters": masters, "copies": {i: masters[i].clone() for i in (2, 3, 11)}}
    save(state, tmp_path, chunk_bytes=1 << 20, codec=codec)
    assert len(derived_bytes(tmp_path)) >= 2
    assert_same_bits(load(tmp_path, map_location=str(device)), state)
    assert_same_bits(load(tmp_path), state, device=False)
    assert_same_bits(load(tmp_path, part="w", map_location=str(device)), weights)
    target = {
        "w": {i: torch.zeros_like(w) for i, w in weights.items()},
        "masters": [torch.zeros_like(m) for m in masters],
        "copies": {i: torch.zeros_like(c) for i, c in state["copies"].items()},  # type: ignore[attr-defined]
    }
    assert_same_bits(load(tmp_path, into=target), state)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_small_sources_beside_large_ones(
    tmp_path: Path, device: torch.device, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As norms stand between matrices. On a GPU each chunk's are made at once; where all are small, in the end."""
    masters = [torch.randn(9_000 + i if i % every == 0 else 40_000 + i, device=device) for i in range(24)]
    state = {"w": [m.bfloat16() for m in masters], "masters": masters}
    save(state, tmp_path, chunk_bytes=16 << 20, codec="raw")
    assert derived_bytes(tmp_path) == {"bf16-of-f32": 2 * sum(m.numel() for m in masters)}
    calls = []

    def counted(*args: Any) -> None:
        calls.append(args)
        follow(*args)

    monkeypatch.setattr("tidegate.derived_places.follow", counted)
    assert_same_bits(load(tmp_path, map_location=str(device)), state)
    if device.type == "cuda":
        assert len(calls) == 1
    target = {name: [torch.zeros_like(x) for x in there] for name, there in state.items()}
    assert_same_bits(load(tmp_path, into=target), state)


def test_one_file_derives_too(tmp_path: Path, device: torch.device) -> None:
    state = pair(torch.bfloat16, device)
    small = tidegate.save(state, tmp_path / "a.tg").stored_bytes
    assert tidegate.save(state, tmp_path / "b.tg", derive=False).stored_bytes - small > 1.2 * NUMEL
    assert_same_bits(tidegate.load(tmp_path / "a.tg", map_location=str(device)), state)
    assert run_cli(["verify", str(tmp_path / "a.tg")]) == run_cli(["inspect", str(tmp_path / "a.tg")]) == 0


@pytest.mark.parametrize(
    ("derive", "match"),
    [
        ({"w": "nothing"}, "no tensor there"),
        ({"m": "master", "master": "m"}, "both as a target and as a source"),
        ({"master": "w"}, "neither a bf16"),
        ("w", "give True, False, or a mapping"),
    ],
)
def test_pairs_that_are_none_are_refused(tmp_path: Path, derive: DeriveOption, match: str) -> None:
    with pytest.raises(tidegate.ConfigError, match=match):
        save(pair(torch.bfloat16), tmp_path, derive=derive)


def _rule_of(fields: dict[str, Any]) -> dict[str, Any]:
    return fields["derived"][0]


def _extent_of(fields: dict[str, Any], dtype: str) -> int:
    """The first extent of a dtype."""
    tensor = next(i for i, spec in enumerate(fields["tensor_spec"]) if fields["specs"][spec]["dtype"] == dtype)
    return tensor if fields["tensor_extent"] is None else fields["tensor_extent"][tensor]


HOSTILE: dict[str, Any] = {
    "an unknown rule": lambda f: _rule_of(f).update(rule="triple"),
    "another version": lambda f: _rule_of(f).update(version=2),
    "a version that is no number": lambda f: _rule_of(f).update(version=True),
    "no rule": lambda f: f.update(derived=[3]),
    "no list": lambda f: f.update(derived={}),
    "no chunk": lambda f: _rule_of(f).update(chunks=[[]]),
    "a chunk that is not there": lambda f: _rule_of(f)["chunks"].append([999, 0]),
    "a chunk twice": lambda f: _rule_of(f)["chunks"].append(_rule_of(f)["chunks"][0]),
    "too many sources": lambda f: _rule_of(f)["chunks"][0].append(0),
    "a source that is not there": lambda f: _rule_of(f)["chunks"][0].__setitem__(1, 999),
    "a negative source": lambda f: _rule_of(f)["chunks"][0].__setitem__(1, -1),
    "itself": lambda f: _rule_of(f)["chunks"][0].__setitem__(1, _extent_of(f, "bfloat16")),
    "a shorter source": lambda f: _rule_of(f)["chunks"][0].__setitem__(1, _extent_of(f, "float64")),
    "a stored chunk": lambda f: _rule_of(f)["chunks"].append([len(f["chunks"]) - 1, 0]),
    "no features": lambda f: f.update(features=["derived", "more"]),
    "nothing derived": lambda f: f.update(derived=[]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_manifests_are_refused(tmp_path: Path, case: str) -> None:
    save(pair(torch.bfloat16) | {"d": torch.arange(9.0, dtype=torch.float64)}, tmp_path)
    load(tmp_path, step=0)
    edit_manifest(tmp_path, 0, HOSTILE[case])
    with pytest.raises(tidegate.CorruptCheckpointError):
        load(tmp_path, step=0)


def test_the_same_rule_on_a_chain_of_sources_is_refused(tmp_path: Path) -> None:
    first = torch.randn(NUMEL)
    save({"a": first, "b": first.clone(), "c": first.clone()}, tmp_path)

    def chain(fields: dict[str, Any]) -> None:
        rows = _rule_of(fields)["chunks"]
        assert {row[1] for row in rows} == {0}
        for row in rows:
            if fields["chunks"][row[0]][0] == 2:
                row[1] = 1

    edit_manifest(tmp_path, 0, chain)
    with pytest.raises(tidegate.CorruptCheckpointError, match="not stored itself"):
        load(tmp_path, step=0)


def test_a_state_without_pairs_is_written_as_ever(tmp_path: Path) -> None:
    state = {"a": torch.randn(NUMEL), "b": torch.arange(NUMEL), "n": np.arange(10_000.0)}
    save(state, tmp_path / "on")
    save(state, tmp_path / "off", derive=False)
    objects = [next(root.rglob("*.tg")).read_bytes() for root in (tmp_path / "on", tmp_path / "off")]
    assert objects[0] == objects[1]
    assert derived_bytes(tmp_path / "on") == {}

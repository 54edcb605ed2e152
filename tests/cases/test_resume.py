"""A whole trainer's state in a new process: random numbers go on as if nothing had happened (A14).

A second environment with NumPy 1.26 is more than a test can build. What breaks between NumPy 1 and 2 is the class path
of a pickle, so these tests show instead that a checkpoint has no pickle and names no class of NumPy's.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import json
import math
import random
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.children import run, run_forked
from tests.kit.killing import die

CLASSES: list[type] = []


class Phase(enum.Enum):
    """An Enum of the caller's."""

    WARMUP = "warmup"
    DECAY = "decay"


@dataclasses.dataclass
class Schedule:
    """A dataclass of the caller's."""

    rate: float
    phase: Phase
    milestones: tuple[int, ...]


class Span(NamedTuple):
    """A named tuple of the caller's."""

    first: int
    last: np.int64


CLASSES += [Phase, Schedule, Span]


def trainer_state(generator: np.random.Generator) -> dict[str, object]:
    """What trainers keep beside their tensors, and the state of every source of random numbers."""
    counts: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    counts["seen"].append(3)
    state: dict[str, object] = {
        "python": random.getstate(),
        "np": np.random.get_state(),
        "np generator": generator.bit_generator.state,
        "torch": torch.get_rng_state(),
        "loss": np.float64(0.1),
        "order": np.arange(10),
        "grid": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "counts": counts,
        "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
        "schedule": Schedule(3e-4, Phase.DECAY, (10, 20)),
        "span": Span(1, np.int64(2)),
        "time": datetime.datetime(2026, 11, 29, 20, 4, 5, 678, tzinfo=datetime.UTC),
        "bytes": b"\x00\xff",
        "complex": complex(0.0, -0.0),
        "large": 10**40,
        "nan": math.nan,
        "weights": torch.arange(1000.0),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: dict[str, object]) -> np.random.Generator:
    """Set every source of random numbers."""
    random.setstate(state["python"])  # type: ignore[arg-type]
    np.random.set_state(state["np"])  # type: ignore[arg-type]
    generator = np.random.default_rng()
    generator.bit_generator.state = state["np generator"]
    torch.set_rng_state(state["torch"])  # type: ignore[arg-type]
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])  # type: ignore[arg-type]
    return generator


def draws(generator: np.random.Generator) -> list[object]:
    """100 numbers of each source, as exact text."""
    numbers: list[float] = []
    for _ in range(100):
        numbers += [random.gauss(0, 1), random.random(), np.random.standard_normal(), generator.standard_normal()]
        numbers += [float(torch.randn(())), float(torch.rand((), dtype=torch.float64))]
        if torch.cuda.is_available():
            numbers.append(float(torch.randn((), device="cuda")))
    return [number.hex() for number in numbers]


def train_and_die(root: Path) -> None:
    """Draw some, save, draw the next hundred, note them, and get killed."""
    generator = np.random.default_rng(7)
    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    random.gauss(0, 1), np.random.standard_normal(), generator.random(), torch.randn(3)  # each has one more in store
    engine = tidegate.CheckpointEngine(root / "run")
    engine.save_async(trainer_state(generator), step=1)
    engine.wait()
    tidegate.save(trainer_state(generator), root / "state.tg")
    (root / "draws.json").write_text(json.dumps(draws(generator)))
    die()


_RESUME = """
    import json, sys
    from pathlib import Path
    import torch, tidegate
    from tests.cases.test_resume import CLASSES, draws, restore

    refused = []
    sys.addaudithook(lambda event, args: refused.append(args) if event == "pickle.find_class" else None)
    root = Path(sys.argv[1])
    with torch.serialization.safe_globals(CLASSES):
        with tidegate.CheckpointEngine(root / "run") as engine:
            first = draws(restore(engine.load()))
        second = draws(restore(tidegate.load(root / "state.tg")))
    assert not refused, f"something was unpickled: {refused}"
    print(json.dumps([first, second]))
"""


def test_A14_a_new_process_draws_what_the_old_one_would_have(tmp_path: Path) -> None:
    assert run_forked(train_and_die, tmp_path) == -9
    expected = json.loads((tmp_path / "draws.json").read_text())
    assert len(set(expected)) > 500
    assert json.loads(run(_RESUME, tmp_path)) == [expected, expected]


def test_A14_the_state_comes_back_equal(tmp_path: Path) -> None:
    state = trainer_state(np.random.default_rng(7))
    tidegate.save(state, tmp_path / "state.tg")
    with torch.serialization.safe_globals(CLASSES):
        assert_same_bits(tidegate.load(tmp_path / "state.tg"), state)
    with pytest.raises(tidegate.LoadError, match=r"Schedule") as caught:
        tidegate.load(tmp_path / "state.tg")
    assert "safe_globals" in str(caught.value), "it says what to do"


def test_A14_no_pickle_and_no_class_of_numpys_is_in_the_files(tmp_path: Path) -> None:
    """So nothing in them depends on where a version of NumPy keeps its classes."""
    with tidegate.CheckpointEngine(tmp_path, codec="raw") as engine:
        engine.save_async(trainer_state(np.random.default_rng(7)), step=1)
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(contents) == 3
    for content in contents:
        for trace in (b"numpy", b"_core", b"multiarray", b"_reconstruct", b"builtins", b"collections", b"c__"):
            assert trace not in content
        assert not re.search(rb"\x80[\x02-\x05][\x95c}\]]", content), "the head of a pickle"
    manifest = next(tmp_path.rglob("manifest.json")).read_text()
    classes = set(re.findall(r'"([\w.]+:[\w.]+)"', manifest))
    assert classes == {f"tests.cases.test_resume:{cls.__name__}" for cls in CLASSES}


class Unsupported:
    """What nobody can save."""


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (Unsupported(), "Unsupported"),
        (np.array([object()], dtype=object), "Python objects"),
        (random.Random(), "getstate"),
    ],
)
def test_A14_what_cannot_be_saved_is_refused_by_name(tmp_path: Path, value: object, what: str) -> None:
    root = tmp_path / "root"
    with tidegate.CheckpointEngine(root) as engine, pytest.raises(tidegate.UnsupportedStateError) as caught:
        engine.save_async({"trainer": {"extra": [1, value]}}, step=1)
    assert caught.value.path == "trainer.extra.1"
    assert what in str(caught.value)
    assert not root.exists()

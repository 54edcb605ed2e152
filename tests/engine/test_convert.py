"""Checkpoints go to other formats and back bit for bit, and a large one through little memory."""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.chains import save_steps, state_at
from tests.kit.children import run
from tests.kit.states import odd_values
from tidegate.cli import main as command_line
from tidegate.convert import convert
from tidegate.dcp import TidegateReader
from tidegate.delta import DeltaPolicy
from tidegate.errors import CorruptCheckpointError, UnsupportedStateError
from tidegate.safetensors_file import read_safetensors
from tidegate.storage import open_store


def training_state() -> dict[str, Any]:
    weight = torch.randn(33, 20)
    return {
        "model": OrderedDict([("w", weight), ("tied", weight), ("odd", odd_values(torch.bfloat16, 50))]),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(33, 20)}}, "lr": 1e-3},
        "turned": torch.randn(4, 6).t(),
        "none": torch.empty(0, 3),
        "step": 7,
        "names": ["a", (1, None)],
    }


def flat_tensors() -> dict[str, torch.Tensor]:
    return {
        "model.w": torch.randn(33, 20), "b": torch.arange(7), "flags": torch.tensor([True, False, True]),
        "half": odd_values(torch.float16, 33), "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 2), "eight": torch.arange(5, dtype=torch.uint8),
    }  # fmt: skip


def no_process_group(run: Any, *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        return run(*args, **options)


@pytest.mark.parametrize("target", ["there.tg", "root"])
def test_torch_save_there_and_back(tmp_path: Path, target: str) -> None:
    state = training_state()
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / target)
    loaded = tidegate.load(tmp_path / target) if target.endswith(".tg") else _newest(tmp_path / target)
    assert_same_bits(state, loaded)
    convert(tmp_path / target, tmp_path / "b.pt")
    assert_same_bits(state, torch.load(tmp_path / "b.pt", weights_only=True))


@pytest.mark.parametrize(("part", "name"), [(None, "a.pt"), ("model", "a.pt"), ("model", "a.safetensors")])
def test_differences_and_what_follows_are_put_together(tmp_path: Path, part: str | None, name: str) -> None:
    """A step whose weights follow from a master that is a difference to an earlier step's."""
    store = open_store(tmp_path / "root")
    save_steps(store, [0, 1, 2], DeltaPolicy(max_chain=4))
    store.close()
    convert(tmp_path / "root", tmp_path / name, part=part)
    whole = state_at(2)
    if name.endswith(".pt"):
        found = torch.load(tmp_path / name, weights_only=True)
    else:
        found = read_safetensors(tmp_path / name)
    assert_same_bits(found, whole if part is None else whole[part])


def test_safetensors_there_and_back(tmp_path: Path) -> None:
    state = flat_tensors()
    tidegate.save(state, tmp_path / "a.tg")
    convert(tmp_path / "a.tg", tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.tg")
    loaded = tidegate.load(tmp_path / "b.tg")
    assert isinstance(loaded, dict)
    assert_same_bits({name: state[name] for name in sorted(state)}, {name: loaded[name] for name in sorted(loaded)})


def test_a_part_goes_into_safetensors_and_a_whole_that_has_values_does_not(tmp_path: Path) -> None:
    tidegate.save(training_state(), tmp_path / "a.tg")
    with pytest.raises(tidegate.ConfigError, match=r"optimizer\.lr is none"):
        convert(tmp_path / "a.tg", tmp_path / "a.safetensors")
    convert(tmp_path / "a.tg", tmp_path / "a.safetensors", part="model")
    assert (tmp_path / "a.safetensors").stat().st_size < 2 * 33 * 20 * 4 + 1000


def test_dcp_there_and_back(tmp_path: Path) -> None:
    state = {"model": flat_tensors(), "step": 7, "lists": [torch.ones(3), {"a": (1, 2)}]}
    no_process_group(dcp.save, state, checkpoint_id=tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "ours", step=4)
    assert_same_bits(state, _newest(tmp_path / "ours"))
    loaded = _blank(state)
    no_process_group(dcp.load, loaded, storage_reader=TidegateReader(tmp_path / "ours", step=4))
    assert_same_bits(state, loaded)
    convert(tmp_path / "ours", tmp_path / "again", to="dcp")
    loaded = _blank(state)
    no_process_group(dcp.load, loaded, checkpoint_id=tmp_path / "again")
    assert_same_bits(state, loaded)


def test_the_command_line_converts_and_looks_at_sharded_checkpoints(tmp_path: Path, capsys: Any) -> None:
    no_process_group(dcp.save, {"w": torch.ones(5)}, checkpoint_id=tmp_path / "dcp")
    assert command_line(["convert", str(tmp_path / "dcp"), str(tmp_path / "ours"), "--step", "3"]) == 0
    for command in ("list", "inspect", "verify"):
        assert command_line([command, str(tmp_path / "ours")]) == 0
    out = capsys.readouterr().out
    assert "1 tensors of 1 ranks" in out and "are whole" in out
    assert command_line(["convert", str(tmp_path / "ours"), str(tmp_path / "w.pt")]) == 0
    assert torch.load(tmp_path / "w.pt", weights_only=True)["w"].tolist() == [1.0] * 5
    assert command_line(["convert", str(tmp_path / "absent.pt"), str(tmp_path / "x.tg")]) == 1


class Boom:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('it ran')",))


def test_A23_nothing_in_a_foreign_file_is_run(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Boom()))
    with pytest.raises(CorruptCheckpointError, match="which no metadata of DCP has"):
        convert(tmp_path / "dcp", tmp_path / "ours")
    torch.save({"x": Boom()}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedStateError):
        convert(tmp_path / "a.pt", tmp_path / "a.tg")


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"[]"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        convert(tmp_path / "a.safetensors", tmp_path / "a.tg")


def _newest(root: Path) -> object:
    with tidegate.CheckpointEngine(root) as engine:
        return engine.load()


def _blank(state: dict[str, Any]) -> dict[str, Any]:
    """What is to be loaded into."""
    model = {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}
    return {"model": model, "step": 0, "lists": [torch.zeros(3), {"a": 0}]}


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """What goes there and back is twice as large as the memory that it takes: a few chunks of a sixteenth of it."""
    tensors = {f"t{i}": torch.full((4 << 20,), float(i)) for i in range(16)}
    torch.save(tensors, tmp_path / "a.pt")
    code = """
        import sys
        from pathlib import Path
        from tidegate.convert import convert

        def anonymous_bytes():
            lines = Path("/proc/self/status").read_text().splitlines()
            return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))

        import threading
        peak, done = [0], threading.Event()

        def watch():
            while not done.wait(0.005):
                peak[0] = max(peak[0], anonymous_bytes())

        folder = Path(sys.argv[1])
        small = folder / "small.pt"
        import torch
        torch.save({"t": torch.ones(10)}, small)
        convert(small, folder / "small.tg")
        convert(folder / "small.tg", folder / "small2.pt")
        before = anonymous_bytes()
        thread = threading.Thread(target=watch)
        thread.start()
        convert(folder / "a.pt", folder / "root")
        convert(folder / "root", folder / "b.pt")
        done.set()
        thread.join()
        print(peak[0] - before)
    """
    grown_bytes = int(run(code, tmp_path))
    loaded = torch.load(tmp_path / "b.pt", mmap=True, weights_only=True)
    assert all(bool((loaded[name] == tensor).all()) for name, tensor in tensors.items())
    assert grown_bytes < 128 << 20, f"{grown_bytes:,}"

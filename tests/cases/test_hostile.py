"""Checkpoints that mean harm: nothing in them runs, leads out of the root, or hangs a reader (A23, A24)."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import shutil
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.forging import attempt_folder, edit_manifest, record_of, sign
from tests.kit.states import filled
from tidegate import cli
from tidegate.commit import commit_key, step_folder

# A23


class Touch:
    """An object whose unpickling makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def torch_file(path: Path) -> bytes:
    """What `torch.save` makes of it."""
    out = io.BytesIO()
    torch.save(Touch(path), out)
    return out.getvalue()


PICKLES: dict[str, Callable[[Path], bytes]] = {
    **{f"protocol {n}": lambda path, n=n: pickle.dumps(Touch(path), n) for n in (0, 2, 5)},
    "torch.save": torch_file,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with one committed step."""
    root = tmp_path / "root"
    with tidegate.CheckpointEngine(root) as engine:
        engine.save_async(filled(1.0), step=1, metadata={"run": "r1"})
    return root


def read_in_every_way(root: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Load and run every command that reads; return what refused it. Anything but our own errors fails the test."""
    messages = []
    with tidegate.CheckpointEngine(root) as engine:
        for step in ("latest", 1):
            try:
                engine.load(step)  # type: ignore[arg-type]
            except tidegate.CheckpointError as exc:
                messages.append(str(exc))
        engine.steps()
    for command in ("list", "inspect", "verify", "gc"):
        capsys.readouterr()
        code = cli.main([command, str(root)])
        error = capsys.readouterr().err
        assert code in (0, 1)
        assert bool(error) <= (code == 1)
        messages += [error] if error else []
    return messages


@pytest.mark.parametrize("kind", PICKLES)
@pytest.mark.parametrize("place", ["object", "manifest", "COMMIT", "signed manifest"])
def test_A23_a_pickle_in_a_checkpoint_is_not_run(
    tmp_path: Path, root: Path, kind: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    touched = tmp_path / "touched"
    hostile = PICKLES[kind](touched)
    if place == "signed manifest":
        sign(root, 1, hostile)
    else:
        folder = attempt_folder(root, 1)
        names = {"object": folder / "rank-00000.tg", "manifest": folder / "manifest.json"}
        names.get(place, root / commit_key(1)).write_bytes(hostile)
    messages = read_in_every_way(root, capsys)
    assert not touched.exists()
    assert len(messages) >= 4, "load, load, inspect and verify refuse it"
    assert all(step_folder(1) in message or "step 1" in message or "no checkpoint" in message for message in messages)
    pickle.loads(PICKLES["protocol 2"](touched))
    assert touched.exists(), "the pickle does what it says"


@pytest.mark.parametrize("kind", PICKLES)
def test_A23_a_pickle_for_a_file_is_not_run(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    touched = tmp_path / "touched"
    path = tmp_path / "model.tg"
    content = PICKLES[kind](touched)
    for hostile in (content, content + bytes(-len(content) % 4096)):
        path.write_bytes(hostile)
        with pytest.raises(tidegate.CorruptCheckpointError, match=r"model\.tg"):
            tidegate.load(path)
        for command in ("inspect", "verify"):
            assert cli.main([command, str(path)]) == 1
            assert "model.tg" in capsys.readouterr().err
    assert not touched.exists()


@pytest.mark.parametrize(
    "node",
    [
        ["pickle", "gASV"],
        ["reduce", "os:system", ["true"]],
        ["global", "os", "system"],
        ["object", "builtins:open", {"file": "x"}],
        ["t", 0, "os.system"],
        ["path", "os.system"],
        ["ndarray", "|O", [1], 0],
        ["npscalar", "|O", "gASV"],
        ["dataclass", "os:system", {}],
        ["namedtuple", "os:stat_result", ["st_mode", 1]],
        ["enum", "signal:Signals", "SIGTERM"],
        ["defaultdict", "os.system"],
        ["dtype", "__class__"],
    ],
    ids=lambda node: node[0] + " " + str(node[1]),
)
def test_A23_no_tag_of_a_state_runs_anything(root: Path, node: object, capsys: pytest.CaptureFixture[str]) -> None:
    def put(fields: dict[str, Any]) -> None:
        fields["state"]["extra"] = node

    edit_manifest(root, 1, put)
    with tidegate.CheckpointEngine(root) as engine, pytest.raises(tidegate.LoadError):
        engine.load(1)
    for command in ("list", "inspect", "verify", "gc"):
        assert cli.main([command, str(root)]) in (0, 1)
    capsys.readouterr()


def test_A23_metadata_and_bytes_stay_what_they_are(tmp_path: Path) -> None:
    """A pickle inside a state or inside metadata is bytes like any other."""
    touched = tmp_path / "touched"
    hostile = pickle.dumps(Touch(touched))
    state = {"bytes": hostile, "tensor": torch.frombuffer(bytearray(hostile), dtype=torch.uint8), "long": hostile * 100}
    root = tmp_path / "root"
    with tidegate.CheckpointEngine(root) as engine:
        engine.save_async(state, step=1, metadata={"pickle": base64.b64encode(hostile).decode()})
        engine.wait()
        assert_same_bits(engine.load(), state)
    tidegate.save(state, tmp_path / "x.tg")
    assert_same_bits(tidegate.load(tmp_path / "x.tg"), state)
    assert cli.main(["verify", str(root)]) == 0
    assert not touched.exists()


# A24


@pytest.fixture
def outside(tmp_path: Path, root: Path) -> Path:
    """A folder beside the root. Wherever the tests below lead, there is an object as good as the true one."""
    outside = tmp_path / "outside"
    attempt = attempt_folder(root, 1)
    shutil.copytree(attempt, outside / "attempt")
    shutil.copytree(root / step_folder(1), outside / "step")
    shutil.copytree(attempt, root / step_folder(2) / attempt.name)
    shutil.copytree(attempt, f"{attempt}x")
    for path in (tmp_path / "secret", root / "rank-00000.tg", root / step_folder(1) / "secret"):
        shutil.copy(attempt / "rank-00000.tg", path)
    return outside


def tree(folder: Path) -> dict[str, object]:
    """Everything below a folder: what it is, and the bytes of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else path.lstat().st_mode
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "key",
    [
        "../../secret",
        "{attempt}/../../../secret",
        "{attempt}/../../../../../../etc/hostname",
        "/etc/hostname",
        "{attempt}//rank-00000.tg",
        "{attempt}/./rank-00000.tg",
        "{attempt}/..\\secret",
        "{attempt}/rank-00000.tg\0",
        "{attempt}/",
        "step-0000000002/{name}/rank-00000.tg",
        "{attempt}x/rank-00000.tg",
        "",
        "rank-00000.tg",
        "file:///etc/hostname",
    ],
)
def test_A24_an_object_named_outside_its_attempt_is_refused(
    root: Path, outside: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = record_of(root, 1)
    key = key.format(attempt=f"{step_folder(1)}/{record.attempt}", name=record.attempt)

    def rename(fields: dict[str, Any]) -> None:
        fields["objects"][0][0] = key

    edit_manifest(root, 1, rename)
    before = tree(root.parent)
    messages = read_in_every_way(root, capsys)
    assert len(messages) == 4, "load, load, inspect, verify"
    for message in messages:
        assert key.rpartition("/")[2].rstrip("\0") in message
        assert "manifest.json" in message or "object" in message or "key" in message
    assert tree(root.parent) == before


def replace_by_link(path: Path, outside: Path) -> None:
    """Let a link lead to a copy outside that is as good."""
    target = outside / f"copy of {path.name}"
    shutil.move(path, target)
    path.symlink_to(target)


def replace_by_fifo(path: Path, outside: Path) -> None:
    """Let whoever opens it wait for ever."""
    shutil.move(path, outside / f"moved {path.name}")
    os.mkfifo(path)


def replace_by_socket(path: Path, outside: Path) -> None:
    """Put a socket there."""
    shutil.move(path, outside / f"moved {path.name}")
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket may have 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def replace_by_folder(path: Path, outside: Path) -> None:
    """Put a folder there."""
    shutil.move(path, outside / f"moved {path.name}")
    path.mkdir()


@pytest.mark.parametrize("replace", [replace_by_link, replace_by_fifo, replace_by_socket, replace_by_folder])
@pytest.mark.parametrize("place", ["object", "manifest", "COMMIT", "attempt", "step"])
def test_A24_what_is_no_plain_file_is_refused_and_never_waited_for(
    root: Path, outside: Path, replace: Callable[[Path, Path], None], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = attempt_folder(root, 1)
    paths = {
        "object": folder / "rank-00000.tg",
        "manifest": folder / "manifest.json",
        "COMMIT": root / commit_key(1),
        "attempt": folder,
        "step": root / step_folder(1),
    }
    replace(paths[place], outside)
    before = tree(outside)
    with tidegate.CheckpointEngine(root, keep_last=1) as engine:
        for step in ("latest", 1):
            with pytest.raises((tidegate.LoadError, tidegate.CheckpointNotFoundError)):
                engine.load(step)  # type: ignore[arg-type]
        for command in ("list", "inspect", "verify", "gc"):
            assert cli.main([command, str(root), *(["--min-age-s", "0"] if command == "gc" else [])]) in (0, 1)
        engine.save_async(filled(2.0), step=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tidegate.CheckpointWarning)  # that not all of step 1 could be deleted
            engine.wait()
        assert_same_bits(engine.load(2), filled(2.0))
    assert tree(outside) == before, "nothing outside is written, and nothing deleted"
    capsys.readouterr()


def test_A24_a_step_folder_that_is_a_link_takes_no_save(root: Path, outside: Path) -> None:
    (root / step_folder(5)).symlink_to(outside)
    before = tree(outside)
    with tidegate.CheckpointEngine(root) as engine, pytest.raises(tidegate.SaveError, match=step_folder(5)):
        engine.save_async(filled(5.0), step=5)
    assert tree(outside) == before


@pytest.mark.parametrize("step", ["../evil", "1/../../evil", "/evil"])
def test_A24_a_step_is_a_number(root: Path, step: object) -> None:
    before = tree(root.parent)
    with tidegate.CheckpointEngine(root) as engine:
        with pytest.raises(tidegate.ConfigError, match="step is"):
            engine.save_async(filled(1.0), step=step)  # type: ignore[arg-type]
        with pytest.raises(tidegate.ConfigError, match="step is"):
            engine.load(step)  # type: ignore[arg-type]
    assert tree(root.parent) == before


@pytest.mark.parametrize("attempt", ["../../outside/attempt", "..", "/etc", ""])
def test_A24_an_attempt_outside_the_root_is_refused(
    root: Path, outside: Path, attempt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import xxhash

    path = root / commit_key(1)
    body = json.loads(path.read_bytes())["tidegate-commit"]
    body["attempt"] = attempt
    digest = xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True).encode())
    path.write_text(json.dumps({"tidegate-commit": body, "xxh3_64": digest}))
    before = tree(root.parent)
    messages = read_in_every_way(root, capsys)
    assert "COMMIT of step 1 is damaged" in messages[0]
    assert tree(root.parent) == before


@pytest.mark.parametrize("replace", [replace_by_fifo, replace_by_socket, replace_by_folder])
def test_A24_a_file_to_load_that_is_none(tmp_path: Path, replace: Callable[[Path, Path], None]) -> None:
    path = tmp_path / "model.tg"
    tidegate.save(filled(1.0), path)
    (tmp_path / "outside").mkdir()
    replace(path, tmp_path / "outside")
    with pytest.raises(tidegate.CheckpointError, match=r"model\.tg"):
        tidegate.load(path)
    assert cli.main(["inspect", str(path)]) == 1


def test_A24_a_link_that_the_caller_names_is_followed(tmp_path: Path) -> None:
    """Only what a checkpoint names is not to be trusted; `latest.tg -> model-7.tg` is the caller's own."""
    tidegate.save(filled(7.0), tmp_path / "model-7.tg")
    link = tmp_path / "latest.tg"
    link.symlink_to("model-7.tg")
    assert_same_bits(tidegate.load(link), filled(7.0))
    assert cli.main(["verify", str(link)]) == 0
    tidegate.save(filled(8.0), link)
    assert link.is_symlink()
    assert_same_bits(tidegate.load(tmp_path / "model-7.tg"), filled(8.0))

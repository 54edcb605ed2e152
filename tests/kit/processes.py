"""Run a script in a process of its own, with the stores but without torch, which takes seconds to import."""

from __future__ import annotations

import subprocess
import sys

TIMEOUT_S = 60.0

_PRELUDE = """
import importlib.util, sys, types
_spec = importlib.util.find_spec("tidegate")
_package = types.ModuleType("tidegate")
_package.__path__ = list(_spec.submodule_search_locations)
sys.modules["tidegate"] = _package
"""


def run_script(script: str, *arguments: str, extra: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run it to its end.

    Args:
        script: Its text; it can import `tidegate.storage` and nothing else of tidegate.
        *arguments: Its `sys.argv[1:]`.
        extra: Arguments of the interpreter itself.
    """
    command = [sys.executable, *extra, "-c", _PRELUDE + script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

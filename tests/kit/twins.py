"""The ends of interpreters, side by side: one is started, forks once its imports are done, and each fork runs a script.

Such a fork ends as any interpreter does, with its threads waited for and its `atexit` functions run.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .children import ended, script

_FORKER = """
import json, os, sys
import boto3, torch, tidegate, tests.kit.states, tests.kit.stores, tests.kit.warm_s3

_folder, _text, _lists = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
_children = []
for _number, _arguments in enumerate(_lists):
    _pid = os.fork()
    if _pid == 0:
        for _fd, _name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{_folder}/{_number}.{_name}", os.O_WRONLY | os.O_CREAT, 0o600), _fd)
        sys.argv[1:] = _arguments
        torch.set_num_threads(1)
        break
    _children.append(_pid)
else:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in _children]))
    _text = ""
exec(compile(_text, "<script>", "exec"))
"""


def run_twins(
    text: str, argument_lists: Sequence[Sequence[str]], folder: Path, *, environment: Mapping[str, str]
) -> list[subprocess.CompletedProcess[str]]:
    """Run a script once for each list of arguments, all at once; return how each run ended, in their order.

    Args:
        text: The script; it finds its arguments in `sys.argv[1:]`.
        argument_lists: The arguments.
        folder: For what the runs print.
        environment: Variables beside our own.
    """
    lists = [list(arguments) for arguments in argument_lists]
    done = ended(script(_FORKER, folder, text, json.dumps(lists), environment=environment))
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    return [
        subprocess.CompletedProcess(
            arguments, code, (folder / f"{number}.out").read_text(), (folder / f"{number}.err").read_text()
        )
        for number, (arguments, code) in enumerate(zip(lists, codes, strict=True))
    ]

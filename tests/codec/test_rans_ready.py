"""The compiled loops of rans get ready while NumPy works: nothing waits for them, and they are compiled once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.codec.rans_chunks import Octets, coder_named, header_of
from tests.contract.codec_contract import CONTENTS
from tidegate.codec import rans
from tidegate.codec.rans import RansCodec
from tidegate.codec.words import WordType

ROOT = Path(__file__).parents[2]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for machine code, with none in it; for child processes."""
    pytest.importorskip("numba", reason="needs numba: pip install 'tidegate[fast]'")
    folder = tmp_path / "machine-code"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    return folder


def run(script: str) -> str:
    """What a script prints that runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


SAVE = """
    import os, signal, sys, tidegate, torch
    from tidegate.codec.rans_ready import LOOPS
    from tidegate.storage.memory import MemoryStore

    state = {"w": torch.randn(1 << 20), "h": torch.randn(1 << 20).to(torch.bfloat16)}
    store = MemoryStore()
    with tidegate.CheckpointEngine(store, codec="rans", chunk_bytes=1 << 20) as engine:
        for step in range(100):
            engine.save_async(state, step=step, overwrite=True).result(60)
            LOOPS._loader.join()
            if LOOPS.builder is not None:
                break
        assert LOOPS.coder() is None
        assert os.waitid(os.P_PID, LOOPS.builder, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, "it still compiles"
        assert torch.equal(engine.load()["w"], state["w"])
    print(LOOPS.builder)
"""


def test_a_save_does_not_wait_for_the_compiler(empty_cache: Path) -> None:
    """It has ended, its process too, while another still compiles, of which the process group is not ours."""
    builder = int(run(SAVE))
    assert os.getpgid(builder) == builder
    os.kill(builder, signal.SIGKILL)


@pytest.mark.slow
def test_what_was_compiled_once_is_loaded(empty_cache: Path) -> None:
    script = """
        from tidegate.codec.rans_ready import LOOPS, CompiledLoops
        assert LOOPS.coder() is None
        assert LOOPS.wait().__name__ == "tidegate.codec.rans_numba"
        again = CompiledLoops(("/bin/false",))
        assert again.wait() is LOOPS.coder()
    """
    run(script)
    files = {path: path.stat().st_mtime_ns for path in empty_cache.rglob("*.nbc")}
    assert len(files) == 3
    run(script.replace("assert LOOPS.coder() is None", "LOOPS._build_command = ('/bin/false',)"))
    assert {path: path.stat().st_mtime_ns for path in empty_cache.rglob("*.nbc")} == files


@pytest.mark.parametrize("command", ["/bin/false", "/there/is/no/such/program"])
def test_where_nothing_compiles_numpy_goes_on(empty_cache: Path, command: str) -> None:
    run(f"""
        import threading
        from tidegate.codec.rans_ready import CompiledLoops
        loops = CompiledLoops(({command!r},))
        threads = [threading.Thread(target=loops.coder) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert loops.wait() is None
        assert loops.coder() is None
        assert loops.builder is None
    """)


def test_without_a_folder_for_machine_code_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="needs numba: pip install 'tidegate[fast]'")
    monkeypatch.setenv("NUMBA_CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null/none")
    command = [sys.executable, "-m", "tidegate.codec.rans_build"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "NUMBA_CACHE_DIR" in done.stderr


def test_numba_off_is_as_no_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    run("""
        from tidegate.codec.rans_ready import LOOPS
        assert LOOPS.wait() is None
    """)


def test_each_loop_is_compiled_for_one_kind_of_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the chunk: else a save would compile in its midst."""
    coder = coder_named("numba")
    from tidegate.codec.rans_build import run_loops
    from tidegate.codec.rans_decode_loops import decode_loop
    from tidegate.codec.rans_encode_loops import encode_loop
    from tidegate.codec.rans_loops import count_loop

    loops = (count_loop, encode_loop, decode_loop)
    run_loops()
    before = [loop.signatures for loop in loops]
    monkeypatch.setattr(rans, "_coder", lambda: coder)
    codec = RansCodec()
    for word in WordType:
        for content in CONTENTS:
            for num_values in (1, 300, 40_000):
                raw = CONTENTS[content](word, num_values, np.random.default_rng(0))
                for given in (raw, read_only(raw), unaligned(raw)):
                    check(codec, given, word)
    assert [loop.signatures for loop in loops] == before
    assert [len(signatures) for signatures in before] == [1, 1, 1]


def check(codec: RansCodec, raw: Octets, word: WordType) -> None:
    """A chunk and its body, at any address and of any kind, go through the codec."""
    body = np.empty_like(raw)
    body_bytes = codec.encode_body(raw, word, body)
    if body_bytes is not None:
        out = np.empty_like(raw)
        codec.decode_body(header_of(raw, word, body[:body_bytes]), read_only(body[:body_bytes]), out)
        assert out.tobytes() == raw.tobytes()


def read_only(octets: Octets) -> Octets:
    """A view that cannot be written to."""
    view = octets.view()
    view.flags.writeable = False
    return view


def unaligned(octets: Octets) -> Octets:
    """A copy at an odd address."""
    room = np.empty(octets.size + 1, dtype=np.uint8)
    room[1:] = octets
    return room[1:]

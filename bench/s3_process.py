"""Upload from another process, which gets the bytes through shared memory: what tidegate could do, and does not.

python -m bench.s3_process ENDPOINT_URL DESCRIPTOR is that process: it reads numbers of slots and their lengths.
"""

from __future__ import annotations

import mmap
import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from types import TracebackType

import numpy as np

from tidegate.storage import S3Options, S3Store

from .folders import SHARED_MEMORY

SLOT_BYTES = 16 << 20
NUM_SLOTS = 16


class ProcessUpload:
    """Copies bytes into slots, and the other process sends them, while this is entered.

    Args:
        options: Of the store over there.
        num_bytes: How many a call of `begin` uploads.
    """

    def __init__(self, options: S3Options, num_bytes: int) -> None:
        descriptor, path = tempfile.mkstemp(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        os.unlink(path)
        os.truncate(descriptor, NUM_SLOTS * SLOT_BYTES)
        self._slots = np.frombuffer(mmap.mmap(descriptor, NUM_SLOTS * SLOT_BYTES), np.uint8)
        self._content = np.zeros(SLOT_BYTES, np.uint8)
        self._num_bytes = num_bytes
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(NUM_SLOTS):
            self._free.put(slot)
        command = [sys.executable, "-m", "bench.s3_process", str(options.endpoint_url), str(descriptor)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, pass_fds=[descriptor]
        )
        os.close(descriptor)
        self._sealed = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> ProcessUpload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def begin(self) -> threading.Event:
        """Begin one object; the event says that it is durable."""
        self._sealed = threading.Event()
        threading.Thread(target=self._feed, daemon=True).start()
        return self._sealed

    def _feed(self) -> None:
        assert self._process.stdin is not None
        for at in range(0, self._num_bytes, SLOT_BYTES):
            num_bytes = min(SLOT_BYTES, self._num_bytes - at)
            slot = self._free.get()
            np.copyto(self._slots[slot * SLOT_BYTES :][:num_bytes], self._content[:num_bytes])
            self._process.stdin.write(f"{slot} {num_bytes}\n")
        self._process.stdin.write("-1 0\n")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            slot = int(line)
            if slot < 0:
                self._sealed.set()
            else:
                self._free.put(slot)


def main() -> None:
    """Append slots as they come, and tell which ones are free again."""
    memory = memoryview(mmap.mmap(int(sys.argv[2]), NUM_SLOTS * SLOT_BYTES))
    options = S3Options(endpoint_url=sys.argv[1], transport="urllib3")
    with closing(S3Store("bucket", "process", options=options)) as store:
        writer = store.create("object", replace=True)
        for line in sys.stdin:
            slot, num_bytes = map(int, line.split())
            if slot < 0:
                writer.seal()
                writer = store.create("object", replace=True)
                os.write(1, b"-1\n")
                continue
            view = memory[slot * SLOT_BYTES :][:num_bytes]
            line_back = f"{slot}\n".encode()
            writer.append(view).add_done_callback(lambda _, line=line_back: os.write(1, line))  # type: ignore[misc]
            view.release()
        writer.abort()


if __name__ == "__main__":
    main()

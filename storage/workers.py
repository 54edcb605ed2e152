"""Threads that take work from a queue, and go on taking it while the interpreter shuts down.

`concurrent.futures.ThreadPoolExecutor` refuses new work as soon as the interpreter begins to shut down: `atexit`
handlers run after that moment, and from Python 3.12 on no thread can be started then either. A checkpoint that is
still being written when a script ends has to finish in such a handler. So these threads are daemons, all started in the
constructor, and fed through a `queue.SimpleQueue`, whose `put` may interrupt itself. `submit` takes no lock at all: a
signal handler may call it, and wait for the result, whatever it has interrupted.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol, TypeVar, TypeVarTuple

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class _Runnable(Protocol):
    def __call__(self) -> None: ...


_Queue = SimpleQueue[_Runnable | None]


class WorkerPool:
    """A fixed number of daemon threads that run what is submitted, oldest first.

    A pool that is dropped without `close` finishes what is queued and lets its threads end.

    Args:
        num_threads: How many; all are started here.
        name: The threads are called `<name>-0`, `<name>-1`, …

    Raises:
        ValueError: If `num_threads` is less than 1.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        if num_threads < 1:
            raise ValueError(f"a worker pool needs at least one thread, not {num_threads}")
        self._name = name
        self._queue: _Queue = SimpleQueue()
        self._is_busy = [False] * num_threads
        self._is_closed = False
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=_work, args=(self._queue, self._is_busy, i), name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        # Not at exit: handlers that were registered earlier run later, and may still submit.
        weakref.finalize(self, _stop, self._queue, num_threads).atexit = False

    @property
    def num_threads(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    @property
    def num_idle(self) -> int:
        """How many threads have nothing to do, now or with what is queued. No more than a hint: it takes no lock."""
        return max(0, self._is_busy.count(False) - self._queue.qsize())

    def submit(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> Future[_T]:
        """Queue `fn(*args)`. Does not block.

        Returns:
            A future with its result or exception. Once it is done, the pool keeps no reference to `args`.

        Raises:
            RuntimeError: If the pool is closed, or this process is a fork of the one that has the threads.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(f"the threads of {self._name!r} stayed in process {self._pid}; open a new one here")
        if self._is_closed:
            raise RuntimeError(f"{self._name!r} is closed and takes no more work")
        future: Future[_T] = Future()
        task = _task(future, fn, args)
        self._queue.put(task)
        if self._is_closed:  # since a moment ago, so the threads may never come to it
            task()
        return future

    def close(self) -> None:
        """Finish what is queued, then end the threads. Blocks. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            _stop(self._queue, len(self._threads))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


def _stop(queue: _Queue, num_threads: int) -> None:
    for _ in range(num_threads):
        queue.put(None)


def _work(queue: _Queue, is_busy: list[bool], number: int) -> None:
    while (task := queue.get()) is not None:
        is_busy[number] = True
        task()
        is_busy[number] = False
        del task  # or it would keep its arguments alive until the next one comes


def _task(future: Future[_T], fn: Callable[[*_Ts], _T], args: tuple[*_Ts]) -> _Runnable:
    """Make a call of `fn` that happens once, however often and by however many threads it is run."""
    claims = [True]
    calls = [(fn, args)]  # emptied before the future is done, which so holds no argument alive

    def run() -> None:
        try:
            claims.pop()
        except IndexError:  # another thread was faster
            return
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = _call(*calls.pop())
        except BaseException as exc:  # noqa: BLE001 - the future carries it to whoever waits
            future.set_exception(exc)
        else:
            future.set_result(result)

    return run


def _call(fn: Callable[[*_Ts], _T], args: tuple[*_Ts]) -> _T:
    return fn(*args)

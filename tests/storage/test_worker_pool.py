"""The threads that write, and that go on when the interpreter ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from concurrent.futures import Future

import pytest

from tests.kit.processes import run_script
from tidegate.storage.workers import WorkerPool

TIMEOUT_S = 60.0


def test_work_is_done_oldest_first_and_results_come_back() -> None:
    pool = WorkerPool(1, "one")
    seen: list[int] = []

    def note(i: int, j: int) -> int:
        seen.append(i)
        return i * j

    futures = [pool.submit(note, i, 10) for i in range(100)]
    assert [future.result(TIMEOUT_S) for future in futures] == [10 * i for i in range(100)]
    assert seen == list(range(100))
    pool.close()


def test_all_threads_run_from_the_start_and_have_names() -> None:
    before = set(threading.enumerate())
    pool = WorkerPool(3, "named")
    new = [thread for thread in threading.enumerate() if thread not in before]
    assert sorted(thread.name for thread in new) == ["named-0", "named-1", "named-2"]
    assert all(thread.daemon for thread in new)
    assert pool.num_threads == 3
    barrier = threading.Barrier(3)  # three at once, or it would break
    for future in [pool.submit(barrier.wait, TIMEOUT_S) for _ in range(3)]:
        future.result(TIMEOUT_S)
    pool.close()
    assert not any(thread.is_alive() for thread in new)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_goes_to_the_future_and_the_thread_lives_on(error: BaseException) -> None:
    pool = WorkerPool(1, "failing")

    def fail() -> None:
        raise error

    assert pool.submit(fail).exception(TIMEOUT_S) is error
    assert pool.submit(int, "7").result(TIMEOUT_S) == 7
    pool.close()


def test_close_finishes_what_is_queued_and_may_be_repeated() -> None:
    pool = WorkerPool(2, "closing")
    gate = threading.Event()
    done: list[int] = []
    pool.submit(gate.wait, TIMEOUT_S)
    pool.submit(gate.wait, TIMEOUT_S)
    for i in range(50):
        pool.submit(done.append, i)
    closer = threading.Thread(target=pool.close)
    closer.start()
    assert done == []
    gate.set()
    closer.join(TIMEOUT_S)
    assert sorted(done) == list(range(50))
    pool.close()
    with pytest.raises(RuntimeError, match="'closing' is closed"):
        pool.submit(print)


def test_a_task_may_close_its_pool() -> None:
    pool = WorkerPool(1, "self-closing")
    pool.submit(pool.close).result(TIMEOUT_S)
    pool.close()


def test_work_submitted_while_the_pool_closes_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool(2, "late")
    real = pool._queue
    seen: list[int] = []

    class SlowQueue:
        def put(self, task: object) -> None:
            monkeypatch.undo()
            pool.close()  # just before the task is queued, behind the threads' back
            real.put(task)  # type: ignore[arg-type]

    monkeypatch.setattr(pool, "_queue", SlowQueue())
    assert pool.submit(lambda i: seen.append(i), 7).done()
    assert seen == [7]


def test_a_signal_may_come_while_work_is_submitted() -> None:
    """What the signal calls waits for work that a thread of the pool has to submit in turn."""
    pool = WorkerPool(2, "signalled")
    caught: list[int] = []

    def on_alarm(number: int, frame: object) -> None:
        caught.append(pool.submit(lambda: pool.submit(int, "7").result(TIMEOUT_S)).result(TIMEOUT_S))

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        for i in range(50):
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + i * 0.00001)
            while len(caught) == i:
                pool.submit(int, "1")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert caught == [7] * 50
    pool.close()


def test_cancelled_work_is_not_done() -> None:
    pool = WorkerPool(1, "cancelling")
    gate = threading.Event()
    pool.submit(gate.wait, TIMEOUT_S)
    done: list[int] = []
    future: Future[None] = pool.submit(done.append, 1)
    assert future.cancel()
    gate.set()
    pool.close()
    assert done == []


def test_arguments_are_let_go_when_the_future_is_done() -> None:
    class Thing:
        pass

    pool = WorkerPool(1, "forgetful")
    thing = Thing()
    ref = weakref.ref(thing)
    pool.submit(id, thing).result(TIMEOUT_S)
    del thing
    assert ref() is None
    pool.close()


def test_a_dropped_pool_finishes_and_its_threads_end() -> None:
    before = set(threading.enumerate())
    pool = WorkerPool(2, "dropped")
    new = [thread for thread in threading.enumerate() if thread not in before]
    future = pool.submit(int, "7")
    del pool
    gc.collect()
    assert future.result(TIMEOUT_S) == 7
    for thread in new:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in new)


def test_a_pool_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        WorkerPool(0, "none")


AT_EXIT = """
import atexit, sys, threading
from concurrent.futures import wait
from tidegate.storage.workers import WorkerPool

pool = WorkerPool(2, "exit")
gate = threading.Event()
futures = [pool.submit(gate.wait, 60)] + [pool.submit(int, str(i)) for i in range(20)]

def finish():
    gate.set()
    more = [pool.submit(int, str(i)) for i in range(100, 120)]
    wait(futures + more, 60)
    print(sum(future.result() for future in futures[1:] + more))
    pool.close()

atexit.register(finish)
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("sys.exit(3)", 3), ("raise ValueError('uncaught')", 1)],
    ids=["end", "exit", "error"],
)
def test_work_goes_on_while_the_interpreter_shuts_down(ending: str, status: int) -> None:
    ended = run_script(AT_EXIT.format(ending=ending))
    assert ended.stdout == f"{sum(range(20)) + sum(range(100, 120))}\n"
    assert ended.returncode == status


FORKED = """
import os
from tidegate.storage.workers import WorkerPool
pool = WorkerPool(1, "forked")
child = os.fork()
if child == 0:
    try:
        pool.submit(print)
    except RuntimeError as exc:
        os._exit(7 if "stayed in process" in str(exc) else 1)
    os._exit(2)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_told_that_it_has_no_threads() -> None:
    ended = run_script(FORKED, extra=("-W", "ignore"))
    assert ended.returncode == 7

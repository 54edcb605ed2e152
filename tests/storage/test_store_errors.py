"""The map from the operating system's errors, and that errors survive pickling."""

from __future__ import annotations

import errno
import inspect
import os
import pickle
from pathlib import Path

import pytest

from tidegate.storage import errors
from tidegate.storage.errors import (
    InvalidKeyError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    StoreFullError,
    StoreIOError,
    StorePermissionError,
    StoreTimeoutError,
)
from tidegate.storage.oserrors import free_bytes, mapped_errors, storage_error

EXPECTED = {
    errno.ENOSPC: StoreFullError,
    errno.EDQUOT: StoreFullError,
    errno.EFBIG: StoreFullError,
    errno.EACCES: StorePermissionError,
    errno.EPERM: StorePermissionError,
    errno.EROFS: StorePermissionError,
    errno.ENOENT: ObjectNotFoundError,
    errno.EEXIST: ObjectExistsError,
    errno.ETIMEDOUT: StoreTimeoutError,
    errno.ELOOP: InvalidKeyError,
    errno.ENOTDIR: InvalidKeyError,
    errno.EISDIR: InvalidKeyError,
    errno.ENXIO: InvalidKeyError,
}
RETRYABLE = {errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT}
BUILT_IN = {
    ObjectNotFoundError: FileNotFoundError,
    ObjectExistsError: FileExistsError,
    StoreFullError: OSError,
    StorePermissionError: PermissionError,
    StoreTimeoutError: TimeoutError,
    InvalidKeyError: ValueError,
    StoreIOError: OSError,
}


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_every_errno_has_its_error(tmp_path: Path, number: int) -> None:
    cause = OSError(number, os.strerror(number))
    error = storage_error(cause, action="write", path=str(tmp_path / "a"), key="a", needed_bytes=123)
    assert type(error) is EXPECTED.get(number, StoreIOError)
    assert error.retryable is (number in RETRYABLE)
    assert (error.errno, error.key) == (number, "a")
    assert f"cannot write {tmp_path / 'a'}: {os.strerror(number)} [{errno.errorcode[number]}]" in str(error)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_A06_a_full_store_says_what_is_needed_and_free(tmp_path: Path, number: int) -> None:
    error = storage_error(OSError(number, "no"), action="write", path=f"{tmp_path}/x/y", key="x/y", needed_bytes=12345)
    free = free_bytes(str(tmp_path / "x" / "y"))
    assert free is not None
    assert free > 0
    assert "; 12345 more bytes are needed and " in str(error)
    assert " are free; " in str(error)
    assert isinstance(error, OSError)
    assert error.errno == number


def test_an_error_without_errno_is_mapped_too() -> None:
    error = storage_error(OSError("odd"), action="read", path="/x", key="x")
    assert type(error) is StoreIOError
    assert "odd" in str(error)
    assert error.errno is None


def test_our_own_errors_pass_the_map() -> None:
    own = StoreFullError("full", key="a", errno=errno.ENOSPC)
    with pytest.raises(StoreFullError) as caught, mapped_errors("write", "/x", "b"):
        raise own
    assert caught.value is own


def test_the_cause_is_kept() -> None:
    with pytest.raises(ObjectNotFoundError) as caught, mapped_errors("open", "/no/such/thing", "b"):
        os.stat("/no/such/thing")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert caught.value.errno == errno.ENOENT


def test_errors_are_the_built_in_ones_too_and_can_be_pickled() -> None:
    classes = [
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, StorageError) and cls is not StorageError
    ]
    assert set(classes) == set(BUILT_IN)
    for cls in classes:
        error = cls("what, where, what to do", key="a/b", errno=5, retryable=True)
        assert isinstance(error, BUILT_IN[cls])
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is cls
        assert (str(again), again.key, again.errno, again.retryable) == ("what, where, what to do", "a/b", 5, True)

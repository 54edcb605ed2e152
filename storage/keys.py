"""What a key may look like, and which names the stores keep for themselves."""

from __future__ import annotations

import re

from .errors import InvalidKeyError

MAX_KEY_PARTS = 8
MAX_PART_CHARS = 200
PARTIAL_SUFFIX = ".partial"
LOCK_SUFFIX = ".lock"

_PART = re.compile(r"[A-Za-z0-9._=+-]+")


def check_key(key: str) -> None:
    """Refuse a key that is not a plain relative name.

    A key is one to 8 parts joined by "/". A part is 1 to 200 of the characters A-Z a-z 0-9 . _ = + - and is neither "."
    nor "..".

    Raises:
        InvalidKeyError: It names the key and what is wrong with it.
    """
    fault = _fault(key)
    if fault:
        raise InvalidKeyError(f"{_shown(key)} cannot be a key in a store: {fault}", key=key)


def check_new_key(key: str) -> None:
    """Refuse a key that is not plain, or that looks like a leftover, for an object to be written.

    Raises:
        InvalidKeyError: It names the key and what is wrong with it.
    """
    check_key(key)
    if is_reserved(key):
        raise InvalidKeyError(
            f"{_shown(key)} cannot be written: names like .*{PARTIAL_SUFFIX} and .*{LOCK_SUFFIX} are the stores' own",
            key=key,
        )


def check_prefix(prefix: str) -> None:
    """Refuse a prefix for `list` that is neither "" nor a plain key with "/" at its end.

    Raises:
        InvalidKeyError: It names the prefix and what is wrong with it.
    """
    if prefix == "":
        return
    if not prefix.endswith("/"):
        raise InvalidKeyError(f'{_shown(prefix)} cannot be a prefix: it must be "" or end in "/"', key=prefix)
    check_key(prefix[:-1])


def is_reserved(key: str) -> bool:
    """Tell whether the key is that of an unfinished write or of a lock."""
    name = key.rpartition("/")[2]
    return name.startswith(".") and name.endswith((PARTIAL_SUFFIX, LOCK_SUFFIX))


def partial_name(name: str, token: str) -> str:
    """Name an unfinished write of `name`. Long names are cut, so that the result is still a valid part."""
    return f".{name[:160]}.{token}{PARTIAL_SUFFIX}"


def lock_name(name: str) -> str:
    """Name the lock of `name`. Names that differ only after 160 characters share one."""
    return f".{name[:160]}{LOCK_SUFFIX}"


def _fault(key: str) -> str:
    parts = key.split("/")
    if len(parts) > MAX_KEY_PARTS:
        return f"it has {len(parts)} parts; at most {MAX_KEY_PARTS} are allowed"
    for part in parts:
        if part == "":
            return 'it is empty, starts or ends with "/", or has "//" in it'
        if part in (".", ".."):
            return f'"{part}" is no name'
        if len(part) > MAX_PART_CHARS:
            return f"a part has {len(part)} characters; at most {MAX_PART_CHARS} are allowed"
        if not _PART.fullmatch(part):
            return "only A-Z a-z 0-9 . _ = + - are allowed between the slashes"
    return ""


def _shown(key: str) -> str:
    return repr(key) if len(key) <= 300 else f"{key[:300]!r}…"

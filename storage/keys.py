"""What a key may look like, and which names the stores keep for themselves."""

from __future__ import annotations

from .errors import InvalidKeyError

MAX_KEY_PARTS = 8
MAX_PART_BYTES = 200
PARTIAL_SUFFIX = ".partial"
LOCK_SUFFIX = ".lock"

_MAX_NAME_BYTES = 160


def check_key(key: str) -> None:
    """Refuse a key that is not a plain relative name.

    A key is one to 8 parts joined by "/". A part is 1 to 200 bytes of UTF-8, without control characters and
    backslashes, and is neither "." nor "..".

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
    return f".{_cut(name)}.{token}{PARTIAL_SUFFIX}"


def lock_name(name: str) -> str:
    """Name the lock of `name`. Names that differ only after 160 bytes share one."""
    return f".{_cut(name)}{LOCK_SUFFIX}"


def _cut(name: str) -> str:
    return name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")


def _fault(key: str) -> str:
    parts = key.split("/")
    if len(parts) > MAX_KEY_PARTS:
        return f"it has {len(parts)} parts; at most {MAX_KEY_PARTS} are allowed"
    for part in parts:
        if part == "":
            return 'it is empty, starts or ends with "/", or has "//" in it'
        if part in (".", ".."):
            return f'"{part}" is no name'
        if not part.isprintable() or "\\" in part:
            return "control characters and backslashes are not allowed"
        if len(part.encode()) > MAX_PART_BYTES:
            return f"a part has {len(part.encode())} bytes; at most {MAX_PART_BYTES} are allowed"
    return ""


def _shown(key: str) -> str:
    return repr(key) if len(key) <= 300 else f"{key[:300]!r}…"

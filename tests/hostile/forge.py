"""Take a checkpoint apart, change any part of it, and put it together again with every checksum right.

Written from storage/FORMAT.md and codec/FRAME.md alone, so that it also checks that they tell the truth.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import xxhash

import tidegate
from tests.kit.stores import content
from tidegate.codec.digest import digest
from tidegate.storage import MemoryStore, Store, open_store

PAGE = 4096
HEADER = struct.Struct("<4sBBBBQQQQI12s")
ENTRY = struct.Struct("<QQ")
TRAILER = struct.Struct("<8sIIQQQQQ")
HEADER_FIELDS = (
    "magic", "version", "codec", "codec_version", "word", "raw_bytes", "body_bytes", "raw_digest", "body_digest",
    "parameter", "reserved",
)  # fmt: skip
TRAILER_FIELDS = ("magic", "version", "flags", "index_at", "index_bytes", "inner_bytes", "length", "digest")
ATTEMPT = "0123456789abcdef" * 2
STEP = 7
KEY = f"step-{STEP:010d}/{ATTEMPT}/rank-00000.tg"


def seal(octets: bytes) -> bytes:
    """Add the XXH3-64 that headers and trailers end in."""
    return octets + struct.pack("<Q", xxhash.xxh3_64_intdigest(octets))


def padded(octets: bytes) -> bytes:
    """Add zeros up to a whole number of pages."""
    return octets + bytes(-len(octets) % PAGE)


@dataclass(slots=True)
class Frame:
    """One frame: its chunk, its header's fields by name, and its body.

    Attributes:
        index_header: The fields of the copy in the index, where that is to differ.
        offset: What the index says, where that is to differ from the truth.
    """

    chunk: int
    header: dict[str, int | bytes]
    body: bytes
    index_header: dict[str, int | bytes] | None = None
    offset: int | None = None

    def octets(self) -> bytes:
        """Header and body, padded."""
        return padded(pack_header(self.header) + self.body)

    def replace_body(self, body: bytes) -> None:
        """Another body, with length and digest as they should be."""
        self.body = body
        self.header.update(body_bytes=len(body), body_digest=digest(body))


def pack_header(fields: dict[str, int | bytes]) -> bytes:
    """The 64 bytes of a header."""
    return seal(HEADER.pack(*(fields[name] for name in HEADER_FIELDS)))


@dataclass(slots=True)
class Forgery:
    """A checkpoint in parts.

    Attributes:
        fields: The manifest.
        frames: The frames of its only object.
        trailer: Fields of the trailer that lie.
        commit: Fields of the COMMIT record that lie.
        text: The manifest's bytes, where they are not `fields`.
        octets: The object's bytes, where they are not `frames`.
        record: What the manifest says of the object, where that lies.
    """

    fields: dict[str, object]
    frames: list[Frame]
    trailer: dict[str, int | bytes] = field(default_factory=dict)
    commit: dict[str, object] = field(default_factory=dict)
    text: bytes | None = None
    octets: bytes | None = None
    record: list[object] | None = None

    def copy(self) -> Forgery:
        """A copy that shares nothing."""
        return copy.deepcopy(self)

    def manifest(self) -> bytes:
        """The manifest as it will be stored."""
        return json.dumps(self.fields).encode() if self.text is None else self.text

    def object(self, inner: bytes = b"") -> bytes:
        """The `.tg` object; `inner` is the manifest of one that stands alone."""
        if self.octets is not None:
            return self.octets
        parts, index, end = [], [], 0
        for frame in self.frames:
            parts.append(frame.octets())
            header = pack_header(frame.index_header or frame.header)
            index.append(ENTRY.pack(end if frame.offset is None else frame.offset, frame.chunk) + header)
            end += len(parts[-1])
        tail = b"".join(index) + inner
        length = end + len(padded(tail + bytes(TRAILER.size + 8)))
        truth: dict[str, int | bytes] = {
            "magic": b"TGOBJECT",
            "version": 1,
            "flags": 0,
            "index_at": end,
            "index_bytes": len(tail) - len(inner),
            "inner_bytes": len(inner),
            "length": length,
            "digest": digest(tail),
        }
        trailer = seal(TRAILER.pack(*({**truth, **self.trailer}[name] for name in TRAILER_FIELDS)))
        return b"".join(parts) + tail + bytes(length - end - len(tail) - len(trailer)) + trailer

    def truth(self) -> list[object]:
        """What an honest manifest says of the object."""
        octets = self.object()
        tail_digest = int.from_bytes(octets[-16:-8], "little") if len(octets) >= PAGE else 0
        return [KEY, len(octets), f"{tail_digest:016x}"]

    def one_file(self) -> bytes:
        """As `tidegate.save` would have written it."""
        alone = self.copy()
        if self.text is None:
            alone.fields.update(step=-1, attempt="", objects=[])
        return self.object(alone.manifest())

    def root(self, name: str = "forged") -> MemoryStore:
        """As an engine would have written it."""
        store = MemoryStore(name)
        folder = f"step-{STEP:010d}"
        forged = self.copy()
        if self.text is None and self.fields.get("objects") == "as they are":
            forged.fields.update(objects=[self.record or self.truth()])
        text = forged.manifest()
        store.compare_and_put(KEY, self.object(), expected=None)
        store.compare_and_put(f"{folder}/{ATTEMPT}/manifest.json", text, expected=None)
        body = {
            "version": 1,
            "step": STEP,
            "sequence": 1,
            "attempt": ATTEMPT,
            "manifest_bytes": len(text),
            "manifest_digest": f"{xxhash.xxh3_64_intdigest(text):016x}",
        }
        store.compare_and_put(f"{folder}/COMMIT", commit_text({**body, **self.commit}), expected=None)
        return store


def commit_text(body: object) -> bytes:
    """A COMMIT record whose checksum holds."""
    checksum = xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True).encode())
    return json.dumps({"tidegate-commit": body, "xxh3_64": checksum}).encode()


def taken_apart(state: object, codec: str = "zstd", chunk_bytes: int = 1 << 16) -> Forgery:
    """Save a state and take the checkpoint apart."""
    store = MemoryStore()
    with tidegate.CheckpointEngine(store, codec=codec, chunk_bytes=chunk_bytes) as engine:
        engine.save_async(state, step=STEP).result(60)
    octets, text = b"", b""
    for stat in store.list():
        if stat.key.endswith(".tg"):
            octets = content(store, stat.key)
        elif stat.key.endswith("manifest.json"):
            text = content(store, stat.key)
    fields = json.loads(text)
    fields.update(step=STEP, attempt=ATTEMPT, objects="as they are")
    return Forgery(fields, list(_frames(octets)))


def _frames(octets: bytes) -> Iterator[Frame]:
    trailer = dict(zip(TRAILER_FIELDS, TRAILER.unpack(octets[-TRAILER.size - 8 : -8]), strict=True))
    for at in range(trailer["index_at"], trailer["index_at"] + trailer["index_bytes"], ENTRY.size + 64):
        offset, chunk = ENTRY.unpack_from(octets, at)
        header = dict(zip(HEADER_FIELDS, HEADER.unpack_from(octets, offset), strict=True))
        begin = offset + 64
        yield Frame(chunk, header, octets[begin : begin + header["body_bytes"]])


def put_file(octets: bytes, name: str = "forged-file") -> str:
    """Put bytes where `tidegate.load` finds them; returns the URL."""
    store: Store = open_store(f"memory://{name}")
    store.delete("model.tg")
    store.compare_and_put("model.tg", octets, expected=None)
    return f"memory://{name}/model.tg"

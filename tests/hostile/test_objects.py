"""`.tg` objects made to harm: every checksum is right and the fields lie. All are refused, cheaply."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
import zstandard

import tidegate
from tests.hostile.bounds import bounded
from tests.hostile.forge import PAGE, STEP, TRAILER, Forgery, padded, put_file, seal, taken_apart
from tests.hostile.refusing import refused as refused_anyhow
from tests.kit.bits import assert_same_bits
from tidegate.codec.digest import digest
from tidegate.errors import CodecUnavailableError

BLOCK = 4096
RAW_BYTES = 32_768


def state() -> dict[str, object]:
    """One chunk that zstd shrinks, of one-byte words; one that is stored raw; one of several small tensors."""
    return {
        "zeros": torch.zeros(RAW_BYTES, dtype=torch.uint8),
        "noise": torch.arange(500.0).mul_(0.3).sin_(),
        "small": [torch.arange(5), torch.arange(7)],
    }


@functools.cache
def honest() -> Forgery:
    return taken_apart(state())


def frame_index(forgery: Forgery, codec: int) -> int:
    return next(i for i, frame in enumerate(forgery.frames) if frame.header["codec"] == codec)


def changed(change: Callable[[Forgery], object]) -> Forgery:
    forgery = honest().copy()
    change(forgery)
    return forgery


refused = functools.partial(refused_anyhow, names_object=True)


def test_the_forge_makes_good_objects() -> None:
    """Else the tests below would prove nothing."""
    codecs = [frame.header["codec"] for frame in honest().frames]
    assert set(codecs) == {0, 1}
    with tidegate.CheckpointEngine(honest().root()) as engine:
        assert_same_bits(engine.load(), state())
    assert_same_bits(tidegate.load(put_file(honest().one_file())), state())


LENGTHS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda o: b"",
    "one-byte": lambda o: b"T",
    "trailer-alone": lambda o: o[-64:],
    "page-less-one": lambda o: o[-4095:],
    "last-page": lambda o: o[-PAGE:],
    "first-page": lambda o: o[:PAGE],
    "zeros": lambda o: bytes(PAGE),
    "zeros-and-trailer": lambda o: bytes(len(o) - 64) + o[-64:],
    "cut-by-a-byte": lambda o: o[:-1],
    "cut-by-a-page": lambda o: o[:-PAGE],
    "begun-late": lambda o: o[PAGE:],
    "a-byte-more": lambda o: o + b"\0",
    "a-page-more": lambda o: o + bytes(PAGE),
    "a-page-before": lambda o: bytes(PAGE) + o,
    "a-page-inside": lambda o: o[:PAGE] + bytes(PAGE) + o[PAGE:],
    "twice": lambda o: o + o,
    "pickle": lambda o: pickle.dumps(state),
    "pickle-of-a-page": lambda o: padded(pickle.dumps(state)),
    "text": lambda o: b"PK\3\4" * 2048,
}


@pytest.mark.parametrize("name", LENGTHS)
def test_objects_of_another_length(name: str) -> None:
    forgery = honest().copy()
    forgery.octets = LENGTHS[name](honest().object())
    forgery.record = honest().truth()
    with tidegate.CheckpointEngine(forgery.root()) as engine:
        for step in (STEP, "latest"):
            with bounded(), pytest.raises(tidegate.CorruptCheckpointError, match=r"rank-00000\.tg"):
                engine.load(step)  # type: ignore[arg-type]
    url = put_file(LENGTHS[name](honest().one_file()))
    with bounded(), pytest.raises(tidegate.CorruptCheckpointError, match=r"model\.tg"):
        tidegate.load(url)


TRAILERS: list[tuple[str, int | bytes, str]] = [
    ("magic", b"TGOBJEC2", "no .tg object"),
    ("magic", bytes(8), "no .tg object"),
    ("version", 0, "version 0"),
    ("version", 2, "version 2, flags 0x0; this build reads version 1"),
    ("flags", 1, "flags 0x1"),
    ("flags", 2**32 - 1, "flags 0xffffffff"),
    ("index_at", 0, "damaged"),
    ("index_at", 1, "damaged"),
    ("index_at", PAGE, "damaged"),
    ("index_at", 2**62, "damaged"),
    ("index_at", 2**64 - PAGE, "damaged"),
    ("index_bytes", 0, "damaged"),
    ("index_bytes", 79, "damaged"),
    ("index_bytes", 80, "damaged"),
    ("index_bytes", 2**62 // 80 * 80, "damaged"),
    ("index_bytes", 2**64 - 16, "damaged"),
    ("inner_bytes", 2**20, "damaged"),
    ("inner_bytes", 2**63, "damaged"),
    ("inner_bytes", 2**64 - 1, "damaged"),
    ("length", 0, "promises"),
    ("length", PAGE, "promises"),
    ("length", 2**62, "promises"),
    ("digest", 0, "checksum"),
]


@pytest.mark.parametrize(("name", "value", "match"), TRAILERS)
def test_trailers_that_lie(name: str, value: int | bytes, match: str) -> None:
    refused(changed(lambda f: f.trailer.update({name: value})), match)


def test_a_trailer_that_makes_all_of_the_object_its_index() -> None:
    forgery = honest().copy()
    octets = forgery.object()
    tail = octets[: (len(octets) - 64) // 80 * 80]
    fields = TRAILER.pack(b"TGOBJECT", 1, 0, 0, len(tail), 0, len(octets), digest(tail))
    forgery.octets = octets[:-64] + seal(fields)
    forgery.record = forgery.truth()
    with tidegate.CheckpointEngine(forgery.root()) as engine, bounded(), pytest.raises(tidegate.CorruptCheckpointError):
        engine.load()


def set_offset(forgery: Forgery, index: int, offset: int) -> None:
    forgery.frames[index].offset = offset


def set_chunk(forgery: Forgery, index: int, chunk: int) -> None:
    forgery.frames[index].chunk = chunk


INDEXES: dict[str, Callable[[Forgery], object]] = {
    "swapped-offsets": lambda f: (set_offset(f, 0, PAGE), set_offset(f, 1, 0)),
    "overlapping": lambda f: set_offset(f, 1, 0),
    "a-gap": lambda f: set_offset(f, 1, 10 * PAGE),
    "unaligned": lambda f: set_offset(f, 1, 100),
    "beyond": lambda f: set_offset(f, -1, 2**62),
    "beyond-64-bits": lambda f: set_offset(f, -1, 2**64 - PAGE),
    "none": lambda f: f.frames.clear(),
    "one-missing": lambda f: f.frames.pop(),
    "first-missing": lambda f: f.frames.pop(0),
    "one-twice": lambda f: f.frames.append(f.frames[-1]),
    "chunk-twice": lambda f: set_chunk(f, 0, 1),
    "chunk-beyond": lambda f: set_chunk(f, 0, 99),
    "chunk-huge": lambda f: set_chunk(f, 0, 2**64 - 1),
    "chunks-swapped": lambda f: (set_chunk(f, 0, 1), set_chunk(f, 1, 0)),
    "a-thousand": lambda f: f.frames.extend(f.frames[:1] * 1000),
}


@pytest.mark.parametrize("name", INDEXES)
def test_indexes_that_lie(name: str) -> None:
    refused(changed(INDEXES[name]))


def test_frames_in_another_order_are_fine() -> None:
    """A frame may lie anywhere in its object; only the index says which chunk it is."""
    forgery = changed(lambda f: f.frames.reverse())
    with tidegate.CheckpointEngine(forgery.root()) as engine:
        assert_same_bits(engine.load(), state())


HEADERS: list[tuple[str, int | bytes, str]] = [
    ("magic", b"GZIP", "TGFR"),
    ("version", 2, "format version 2 .*upgrade tidegate"),
    ("codec", 77, "codec 77 .*upgrade tidegate"),
    ("codec", 255, "codec 255"),
    ("codec_version", 2, "version 2 .*upgrade tidegate"),
    ("word", 9, "word type 9.*upgrade tidegate"),
    ("word", 255, "word type 255"),
    ("word", 1, "U16"),
    ("raw_bytes", 0, "rank-00000.tg|model.tg"),
    ("raw_bytes", RAW_BYTES + 4096, f"{RAW_BYTES + 4096} bytes"),
    ("raw_bytes", 2**30, f"{2**30} bytes"),
    ("raw_bytes", 2**62, f"{2**62} bytes"),
    ("raw_bytes", 2**64 - 8, "bytes"),
    ("body_bytes", 0, "rank-00000.tg|model.tg"),
    ("body_bytes", RAW_BYTES, "never writes"),
    ("body_bytes", RAW_BYTES - 1, "rank-00000.tg|model.tg"),
    ("body_bytes", 2**62, "never writes"),
    ("body_bytes", 2**64 - 1, "never writes"),
    ("raw_digest", 0, "chunk"),
    ("body_digest", 0, "body"),
    ("parameter", 1, "zeros"),
    ("reserved", b"\1" + bytes(11), "zeros"),
]


@pytest.mark.parametrize(("name", "value", "match"), HEADERS)
def test_headers_that_lie_in_frame_and_index_alike(name: str, value: int | bytes, match: str) -> None:
    refused(changed(lambda f: f.frames[frame_index(f, 1)].header.update({name: value})), match)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, value, _ in HEADERS if name != "magic"])
def test_headers_of_frame_and_index_that_differ(name: str, value: int | bytes) -> None:
    """The index keeps the true header, the frame lies; then the other way round."""

    def in_the_frame(forgery: Forgery) -> None:
        frame = forgery.frames[frame_index(forgery, 1)]
        frame.index_header = dict(frame.header)
        frame.header.update({name: value})

    def in_the_index(forgery: Forgery) -> None:
        frame = forgery.frames[frame_index(forgery, 1)]
        frame.index_header = {**frame.header, name: value}

    refused(changed(in_the_frame))
    refused(changed(in_the_index))


def test_frames_that_hold_more_than_their_chunk_and_a_manifest_that_agrees() -> None:
    """A few bytes that promise a gibibyte: the frame is refused when its table is read, before anything is decoded."""

    def change(forgery: Forgery) -> None:
        frame = forgery.frames[frame_index(forgery, 1)]
        fields = forgery.fields
        chunk = fields["chunks"][frame.chunk]  # type: ignore[index]
        chunk[3] = fields["extent_bytes"][chunk[0]] = 2**30  # type: ignore[index]
        frame.header.update(raw_bytes=2**30)

    refused(changed(change), "chunk")


def test_a_codec_that_no_cpu_decodes_says_so() -> None:
    """As if the checkpoint had been written with ans on a GPU."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")

    def change(forgery: Forgery) -> None:
        frame = forgery.frames[frame_index(forgery, 1)]
        frame.header.update(codec=2, parameter=6)

    refused(changed(change), "ans", CodecUnavailableError, names_object=False)


def zstd_body(block: bytes) -> bytes:
    """A body of RAW_BYTES one-byte words in blocks of BLOCK zeros, the first of them this coded one."""
    count = RAW_BYTES // BLOCK
    table = [1 << 30 | len(block), *[2 << 30 | 1] * (count - 1)]
    start = np.array([BLOCK, 1, count, 0, *table], dtype="<u4").tobytes()
    parts = [start + bytes(-len(start) % 16), block + bytes(-len(block) % 16), *[bytes(16)] * (count - 1)]
    return b"".join(parts)


def test_zstd_bombs() -> None:
    """A block that decodes to 16 MiB or a gibibyte where 4 KiB belong, with and without saying so."""
    good = zstandard.ZstdCompressor().compress(bytes(BLOCK))
    forgery = changed(lambda f: f.frames[frame_index(f, 1)].replace_body(zstd_body(good)))
    with tidegate.CheckpointEngine(forgery.root()) as engine:
        assert_same_bits(engine.load(), state())
    for says_size in (True, False):
        bomb = zstandard.ZstdCompressor(write_content_size=says_size).compress(bytes(16 << 20))
        assert len(bomb) < BLOCK
        refused(changed(lambda f, bomb=bomb: f.frames[frame_index(f, 1)].replace_body(zstd_body(bomb))), "block 0")  # type: ignore[misc]


@pytest.mark.parametrize(
    "body",
    [b"", b"\0", bytes(15), bytes(64), b"\xff" * 64, pickle.dumps(state), b"\xff" * 4096],
    ids=lambda b: repr(b[:6]),
)
def test_bodies_that_are_none(body: bytes) -> None:
    refused(changed(lambda f: f.frames[frame_index(f, 1)].replace_body(body)))
    raw = changed(lambda f: f.frames[frame_index(f, 0)].replace_body(body))
    refused(raw)

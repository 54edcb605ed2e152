"""Tensors of every dtype, layout and aliasing come back bit for bit, and each byte is stored once."""

from __future__ import annotations

import resource
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.engine.through import num_stored_bytes, read_table, stored, through
from tests.kit.bits import assert_same_bits, physical_bytes
from tidegate.codec.words import DTYPE_OF_NAME, WordType
from tidegate.errors import InternalError, TornSnapshotError
from tidegate.extents import ExtentSource, gather, make_tensors, scatter
from tidegate.sources import versions_of
from tidegate.state import describe

DTYPES = sorted(DTYPE_OF_NAME)
MIB = 1 << 20


def owners_versions(source: ExtentSource) -> list[int]:
    return versions_of((source.owner, *source.more_owners))


def random_tensor(numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor whose every bit is random; a bool is 0 or 1."""
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    plain = torch.empty(0, dtype=torch.uint8, device="cpu").set_(raw.untyped_storage()).to(device)
    return over_bytes(plain, dtype)


def over_bytes(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as a dtype; complex32 without torch's warning."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf", category=UserWarning)
        made = torch.empty(0, dtype=dtype, device=raw.device)
    return made.set_(raw.untyped_storage(), 0, (raw.numel() // dtype.itemsize,), (1,))


@pytest.mark.parametrize("name", DTYPES)
def test_A11_every_dtype_and_length(name: str, device: torch.device) -> None:
    dtype = DTYPE_OF_NAME[name]
    state = {n: random_tensor(n, dtype, device) for n in (0, 1, 7, 4097)}
    assert_same_bits(state, through(state))


@pytest.mark.parametrize("name", DTYPES)
def test_A10_every_dtype_through_gaps_and_strides(name: str, device: torch.device) -> None:
    dtype = DTYPE_OF_NAME[name]
    x = random_tensor(24, dtype, device)
    state = {
        "gaps": x.as_strided((3, 4), (8, 2), 1),
        "t": random_tensor(24, dtype, device).as_strided((4, 6), (1, 4)),
        "scalar": random_tensor(5, dtype, device).as_strided((), (), 3),
        "wide": random_tensor(5, dtype, device).as_strided((3, 5), (0, 1)),
    }
    assert_same_bits(state, through(state))


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "channels_last": lambda: torch.randn(8, 4, 3, 3).contiguous(memory_format=torch.channels_last),
    "channels_last_1": lambda: torch.randn(8, 1, 3, 3).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(3, 5).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "expanded": lambda: torch.ones(1, 1000).expand(1000, 1000),
    "expanded_scalar": lambda: torch.tensor(2.5).expand(7, 0, 3),
    "every_second": lambda: torch.randn(9)[::2],
    "columns": lambda: torch.randn(6, 5)[:, 1:],
    "inner": lambda: torch.randn(5, 6, 7)[1:4, 2:5, 3:6],
    "channels_last_gaps": lambda: torch.randn(4, 8, 3, 3).contiguous(memory_format=torch.channels_last)[:, 1:3],
    "overlapping": lambda: torch.arange(10.0).as_strided((4, 4), (2, 1)),
    "overlapping_gaps": lambda: torch.arange(100.0).as_strided((2, 3, 2), (40, 2, 2)),
    "diagonal": lambda: torch.randn(5, 5).diagonal(),
    "conj": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "conj_gaps": lambda: torch.randn(6, 4, dtype=torch.complex128)[::2, 1:].conj(),
    "neg": lambda: torch.randn(5, dtype=torch.complex64).conj().imag,
    "real_part": lambda: torch.randn(5, dtype=torch.complex64).real,
    "conj_of_neg": lambda: torch._neg_view(torch.randn(4, dtype=torch.complex64)).conj(),
    "empty_odd_strides": lambda: torch.empty_strided((0, 3), (7, 2)),
    "size_one_strides": lambda: torch.randn(1, 3).as_strided((1, 3), (99, 1)),
    "many_dims": lambda: torch.randn(1, 2, 1, 3, 1, 2, 1).transpose(1, 5),
    "offset": lambda: torch.randn(50)[13:20],
}


def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same view of a copy of the same storage, elsewhere."""
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).to(device).untyped_storage()
    there = torch.empty(0, dtype=x.dtype, device=device).set_(storage, x.storage_offset(), x.shape, x.stride())
    there = torch._neg_view(there) if x.is_neg() else there
    return there.conj() if x.is_conj() else there


@pytest.mark.parametrize("name", LAYOUTS)
def test_A10_layouts_come_back(name: str, device: torch.device) -> None:
    x = moved(LAYOUTS[name](), device)
    state = {"x": x, "again": [x], "view": x.detach()}
    back = through(state)
    assert_same_bits(state, back)
    assert back["x"].is_leaf and not back["x"].is_inference()


def test_A10_expand_is_not_blown_up() -> None:
    assert num_stored_bytes(torch.ones(1, 1000).expand(1000, 1000)) == 4000
    assert num_stored_bytes(torch.randn(100, 100)[:, ::10]) == 4000
    assert num_stored_bytes(torch.arange(10.0).as_strided((4, 4), (2, 1))) == 40
    assert num_stored_bytes(torch.randn(64, 32, 3, 3).contiguous(memory_format=torch.channels_last)) == 64 * 32 * 36


def test_A09_a_slice_stores_the_slice() -> None:
    whole = torch.empty(25 * MIB)
    assert num_stored_bytes({"x": whole[:10]}) == 40
    assert num_stored_bytes({"x": whole[7:10], "y": whole[20 * MIB :][:5]}) == 32
    assert_same_bits(whole[5:9].zero_(), through(whole[5:9]))


def test_A09_views_that_tile_a_buffer_store_it_once() -> None:
    flat = torch.arange(300 * 1000, dtype=torch.float32)
    state = {f"v{i}": piece for i, piece in enumerate(flat.split(1000))}
    table = describe(state)
    assert table.extent_bytes == [4000] * 300
    assert len({source.storage.data_ptr() for source in table.sources}) == 1
    assert_same_bits(state, through(state))
    state["flat"] = flat
    table = describe(state)
    assert table.extent_bytes == [flat.nbytes]
    assert table.tensor_offset == [4000 * i for i in range(300)] + [0]
    assert_same_bits(state, through(state))


def test_A09_staging_copies_only_what_is_stored() -> None:
    flat = torch.empty(64 * MIB, dtype=torch.uint8)
    table = describe([piece[:16] for piece in flat.split(MIB)] + [flat[1024 : 32 * MIB : MIB]])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = torch.empty(sum(table.extent_bytes), dtype=torch.uint8)
    gather(table.sources, out)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # in KiB
    assert out.numel() == 64 * 16 + 32


def test_ties_and_overlaps_come_back() -> None:
    w = torch.randn(6, 4)
    flat = torch.randn(40)
    state = {
        "tied": [w, w.t(), w.view(-1), w[1:3], w[:, 0], torch.nn.Parameter(w)],
        "even_odd": [flat[::2], flat[1::2]],
        "halves": [flat[:25], flat[15:]],
        "alone": flat.clone()[3:7],
    }
    assert_same_bits(state, through(state))
    assert num_stored_bytes(state) == w.nbytes + flat.nbytes + 16
    back = through(state)
    back["tied"][0][1, 0] = 77.0
    assert back["tied"][1][0, 1] == back["tied"][5][1, 0] == back["tied"][3][0, 0] == 77.0


def test_two_objects_of_one_geometry_share_an_extent() -> None:
    base = torch.randn(50, 50)
    state = [base[:, 3], base[:, 3], base[:, 3].detach().requires_grad_(), base[:, 3].unsqueeze(0)[0]]
    table = describe(state)
    assert table.extent_bytes == [200]
    assert table.tensor_extent == [0, 0, 0, 0]
    back = through(state)
    assert_same_bits(state, back)
    assert len({id(t) for t in back}) == 4
    with torch.no_grad():
        back[0][4] = 9.0
    assert back[1][4] == back[2][4] == 9.0


def test_sparse_views_that_share_nothing_are_stored_apart() -> None:
    base = torch.randn(1000, 100)
    columns = [base[:, i] for i in (0, 5, 7)]
    assert num_stored_bytes(columns) == 3 * 4000
    assert_same_bits(columns, through(columns))
    crossing = [base[:, 0], base[500, :]]
    assert num_stored_bytes(crossing) == 1000 * 400 - 396
    assert_same_bits(crossing, through(crossing))
    halves = [base[:, :50], base[:, 50:]]
    assert num_stored_bytes(halves) == base.nbytes
    assert_same_bits(halves, through(halves))


def test_views_of_several_dtypes_share_memory() -> None:
    raw = torch.randint(0, 256, (64,), dtype=torch.uint8)
    z = torch.randn(6, dtype=torch.complex64)
    state = {
        "mixed": [raw[3:], raw.view(torch.int16)[9:], raw.view(torch.float64)[2:5]],
        "shifted": [raw.clone()[17:60].view(torch.uint8), 1],
        "complex": [z, torch.view_as_real(z), z.real, z[2:].conj()],
        "same_width": [x := torch.randn(4), x.view(torch.int32)],
    }
    table = describe(state)
    assert_same_bits(state, through(state))
    words = {table.fqn(i): table.extent_words[table.tensor_extent[i]] for i in range(len(table.tensors))}
    assert words["mixed.0"] == words["same_width.0"] == WordType.U8
    assert words["complex.0"] == words["complex.1"] == WordType.F32
    tail = raw[24:]
    pair = [tail[5:8], tail[4:8].view(torch.int32)]
    assert describe(pair).extent_bytes == [16]  # from byte 16 of the storage on, so that an int32 lies well
    assert_same_bits(pair, through(pair))


def test_empty_tensors() -> None:
    base = torch.randn(4, 4)
    state = [base[:0], base[4:], base, torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int8), base[2:2]]
    assert_same_bits(state, through(state))
    assert num_stored_bytes(state) == base.nbytes


def test_flags_come_back() -> None:
    x = torch.randn(3, 3)
    state = {
        "parameter": torch.nn.Parameter(x.clone()),
        "frozen": torch.nn.Parameter(x.clone(), requires_grad=False),
        "int_parameter": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        "leaf": x.clone().requires_grad_(),
        "grad_fn": (x.clone().requires_grad_() * 2),
        "buffer": torch.nn.Buffer(x.clone()),
        "half": torch.nn.Parameter(x.to(torch.bfloat16).t()),
        "complex": torch.nn.Parameter(torch.randn(3, dtype=torch.complex64).conj()),
        "neg": torch.randn(3, dtype=torch.complex64).conj().imag.detach().requires_grad_(),
    }
    back = through(state)
    assert_same_bits(state, back)
    for name, t in back.items():
        assert t.is_leaf, name
        assert t.grad is None, name


def test_A12_loaded_tensors_train_whatever_mode_they_were_made_in() -> None:
    with torch.inference_mode():
        x = torch.randn(4)
        z = torch.randn(2, dtype=torch.complex64).conj()
        state = {"x": x, "p": torch.nn.Parameter(x.clone(), requires_grad=False), "z": z}
        table = describe(state)
        text, extents = stored(table)
        assert [owners_versions(source) for source in table.sources] == [[0]] * 3
        back = make_tensors(read_table(text), extents)
    assert not any(t.is_inference() for t in back)
    assert [physical_bytes(t) for t in back] == [physical_bytes(t) for t in state.values()]
    for t in back:
        t.requires_grad_()
        (t * 2).abs().sum().backward()
        torch.optim.SGD([t], lr=0.1).step()
    fresh = make_tensors(read_table(text), extents)
    for t in fresh:
        t.add_(1).mul_(2)


def test_a_loaded_view_may_be_changed_in_place() -> None:
    with torch.no_grad():
        back = through([torch.randn(2, 3).t(), torch.randn(3, dtype=torch.cfloat).conj(), torch.randn(9)[::2]])
    for t in back:
        t.requires_grad_(False).add_(1)
        assert t._version > 0


SPECIALS = {
    torch.float32: [0x7FC00001, 0xFFC12345, 0x7F800001, 0x0, 0x80000000, 0x7F800000, 0xFF800000, 0x1, 0x807FFFFF],
    torch.float16: [0x7E01, 0xFE55, 0x7C01, 0x0, 0x8000, 0x7C00, 0xFC00, 0x1, 0x83FF],
    torch.bfloat16: [0x7FC1, 0xFFD5, 0x7F81, 0x0, 0x8000, 0x7F80, 0xFF80, 0x1, 0x807F],
    torch.float64: [0x7FF8000000000001, 0xFFF0000000000001, 0x0, 1 << 63, 0x7FF << 52, 1],
}


@pytest.mark.parametrize("dtype", SPECIALS, ids=str)
@pytest.mark.parametrize("layout", ["plain", "gaps"])
def test_A19_nan_payloads_and_signed_zeros(dtype: torch.dtype, layout: str, device: torch.device) -> None:
    raw = np.array(SPECIALS[dtype], dtype=f"<u{dtype.itemsize}")
    x = over_bytes(torch.from_numpy(raw.view(np.uint8).copy()), dtype).to(device)
    if layout == "gaps":
        wide = torch.zeros(len(raw), 3, dtype=dtype, device=device)
        wide[:, 1] = x
        x = wide[:, 1]
    back = through({"x": x, "list": [torch.nn.Parameter(x)]})
    assert physical_bytes(back["x"]) == physical_bytes(back["list"][0]) == raw.tobytes()
    assert back["x"].dtype == dtype


@pytest.mark.parametrize("name", [name for name in DTYPES if DTYPE_OF_NAME[name].itemsize == 1])
def test_A19_all_values_of_a_byte(name: str) -> None:
    x = torch.arange(2 if name == "bool" else 256, dtype=torch.uint8)
    assert_same_bits(over_bytes(x, DTYPE_OF_NAME[name]), through(over_bytes(x, DTYPE_OF_NAME[name])))


def test_extents_of_one_word_type_follow_each_other() -> None:
    kinds = [torch.float32, torch.int64, torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.bfloat16]
    state = [torch.ones(i + 1, dtype=dtype) for i, dtype in enumerate(kinds)] + [np.ones(3, "f4")]
    table = describe(state)
    words = table.extent_words
    assert words == sorted(words)
    assert [table.extent_bytes[table.tensor_extent[i]] for i in (0, 3, 7)] == [4, 16, 12]
    assert table.tensor_extent[0] < table.tensor_extent[3] < table.tensor_extent[7]
    assert all(n % word.itemsize == 0 for n, word in zip(table.extent_bytes, words, strict=True))


@pytest.mark.gpu
def test_extents_of_devices_come_before_those_of_the_cpu() -> None:
    table = describe([torch.ones(2), torch.ones(3, device="cuda"), torch.ones(4), torch.ones(5, device="cuda")])
    assert [source.device.type for source in table.sources] == ["cuda", "cuda", "cpu", "cpu"]
    assert table.extent_bytes == [12, 20, 8, 16]


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
    np.arange(24, dtype="f2").reshape(2, 3, 4).transpose(2, 0, 1),
    np.arange(10)[::-2],
    np.array(5, dtype="u1"),
    np.zeros((0, 3)),
    np.zeros((2, 0), "<U4"),
    np.array(["é\x00x", "", "abc"]),
    np.array([b"a\x00", b"bc"]),
    np.array(["2026-01-31", "NaT"], "M8[D]"),
    np.array([1, -1], "m8[5ms]"),
    np.array([True, False]),
    np.array([1 + 2j, np.nan], "c8"),
    np.array([1, 2], "longdouble"),
    np.zeros(2, [("a", "i2"), ("b", "f8", (2, 2)), ("c", [("d", "S3"), ("e", ">u4")])]),
    np.zeros((2, 2), {"names": ["x"], "formats": ["u2"], "offsets": [3], "itemsize": 9}),
    np.zeros(3, "V5"),
    np.zeros((1,) * 30),
    np.broadcast_to(np.arange(3), (4, 3)),
    np.array([0x7FF0000000000001, 1 << 63], "u8").view("f8"),
    np.zeros(2, "S0"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype.str}-{'x'.join(map(str, a.shape))}"[:30])
@pytest.mark.parametrize("writeable", [True, False])
def test_A14_arrays_come_back(array: np.ndarray, writeable: bool) -> None:
    array = array.copy("K") if writeable else array
    array.flags.writeable = writeable
    state = {"a": array, "b": [array]}
    back = through(state)
    assert_same_bits(state, back)
    assert back["a"].flags.writeable and back["a"].flags.owndata
    assert not np.shares_memory(back["a"], array) and not np.shares_memory(back["a"], back["b"][0])
    assert num_stored_bytes(state) == array.nbytes


def test_arrays_are_read_where_they_lie_and_kept_alive() -> None:
    state = {"a": np.arange(1000.0), "f": np.asfortranarray(np.ones((3, 5)))}
    state["a"].flags.writeable = False
    table = describe(state)
    assert table.sources[0].storage.data_ptr() == state["a"].ctypes.data
    assert table.extent_words == [WordType.F64, WordType.F64]
    expected = state["a"].tobytes()
    state.clear()
    out = torch.empty(8000, dtype=torch.uint8)
    table.sources[0].copy_to(out)
    assert out.numpy().tobytes() == expected


@pytest.mark.parametrize(
    ("dtype", "word"),
    [
        ("f2", WordType.F16), ("<f4", WordType.F32), (">f4", WordType.U8), ("c16", WordType.F64), ("i1", WordType.U8),
        ("u2", WordType.U16), ("i4", WordType.U32), ("m8[s]", WordType.U64), ("U3", WordType.U32), ("S4", WordType.U8),
        ("longdouble", WordType.U8), ("f4,f4", WordType.U8), ("?", WordType.U8), ("V2", WordType.U8),
    ],
)  # fmt: skip
def test_arrays_have_the_words_of_their_dtype(dtype: str, word: WordType) -> None:
    assert describe(np.zeros(3, dtype)).extent_words == [word]


GAPPY: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: random_tensor(400, torch.int16).as_strided((7, 5), (11, 2), 3),
    "boxes": lambda: random_tensor(4000, torch.int32).as_strided((3, 4, 5, 2), (500, 7, 35, 3), 1),
    "complex128": lambda: random_tensor(100, torch.complex128).as_strided((4, 3), (9, 2)),
    "bytes": lambda: random_tensor(100, torch.float8_e5m2)[1::3],
    "double": lambda: random_tensor(50, torch.float64).as_strided((5,), (7,)),
}


@pytest.mark.parametrize("name", GAPPY)
def test_any_piece_of_a_packed_extent_can_be_copied(name: str, device: torch.device) -> None:
    x = GAPPY[name]().to(device) if device.type == "cpu" else _on(GAPPY[name](), device)
    (source,) = describe(x).sources
    assert source.as_bytes() is None
    whole = physical_bytes(x)
    size = min(x.itemsize, 8)
    frame = torch.empty(len(whole) + 16, dtype=torch.uint8, device=device)
    for start in range(0, len(whole) + 1, size):
        for end in range(start, len(whole) + 1, size * 3):
            for shift in (0, 1, 8):
                frame.fill_(0xEE)
                source.copy_to(frame[shift : shift + end - start], start)
                expected = b"\xee" * shift + whole[start:end] + b"\xee" * (len(whole) + 16 - shift - end + start)
                assert frame.cpu().numpy().tobytes() == expected


def _on(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).to(device).untyped_storage()
    return torch.empty(0, dtype=x.dtype, device=device).set_(storage, x.storage_offset(), x.shape, x.stride())


def test_pieces_of_plain_extents(device: torch.device) -> None:
    x = random_tensor(100, torch.float32, device)
    (source,) = describe({"x": x[10:60]}).sources
    live = source.as_bytes()
    assert live is not None and live.data_ptr() == x[10:].data_ptr() and live.numel() == 200
    out = torch.empty(77, dtype=torch.uint8)
    source.copy_to(out, 13)
    assert out.numpy().tobytes() == physical_bytes(x)[40 + 13 : 40 + 90]
    source.copy_to(out[:0], 200)
    for offset, size in ((124, 77), (-1, 5), (201, 0)):
        with pytest.raises(InternalError):
            source.copy_to(torch.empty(size, dtype=torch.uint8), offset)
    with pytest.raises(InternalError):
        source.copy_to(torch.empty(4), 0)
    (packed,) = describe(x[::2]).sources
    with pytest.raises(InternalError):
        packed.copy_to(torch.empty(4, dtype=torch.uint8), 2)


def test_a_storage_that_shrinks_under_a_save_is_torn_not_read() -> None:
    x = torch.ones(1000)
    (source,) = describe(x).sources
    (packed,) = describe(x[::2]).sources
    x.untyped_storage().resize_(64)
    out = torch.empty(4000, dtype=torch.uint8)
    with pytest.raises(TornSnapshotError):
        source.copy_to(out)
    with pytest.raises(TornSnapshotError):
        gather([source], out)
    with pytest.raises(TornSnapshotError):
        packed.copy_to(out[:2000])
    assert x.untyped_storage().nbytes() == 64


def test_the_memory_that_was_described_is_saved_even_if_the_tensor_moves_on() -> None:
    x = torch.ones(10)
    (source,) = describe(x).sources
    x.data = torch.zeros(10)
    out = torch.empty(40, dtype=torch.uint8)
    gather([source], out)
    assert out.view(torch.float32).tolist() == [1.0] * 10


def test_versions_tell_of_changes() -> None:
    x = torch.ones(4)
    (source,) = describe([x, x.view(2, 2)]).sources
    before = owners_versions(source)
    assert before == owners_versions(source) and len(before) == 2
    x.add_(1)
    assert before != owners_versions(source)


@pytest.mark.parametrize("kinds", ["small", "large", "all"])
def test_gather_packs_back_to_back(kinds: str, device: torch.device) -> None:
    state = [random_tensor(n, torch.float32, device).requires_grad_() for n in (1, 0, 7, 8, 100)]
    if kinds != "small":
        state += [random_tensor(n, torch.bfloat16, device) for n in (70_001, 3)]
    if kinds == "all":
        base = random_tensor(9000, torch.int16, device)
        state += [base[1::3], base[5:8], torch.nn.Parameter(random_tensor(20, torch.float64, device)), np.ones(3, "i1")]
        state += [random_tensor(300, torch.complex64, device).conj()]
    sources = [s for s in describe(state).sources if s.device.type == device.type]
    expected = b""
    for source in sources:
        piece = torch.empty(source.num_bytes, dtype=torch.uint8)
        source.copy_to(piece)
        expected += piece.numpy().tobytes()
    for target in {"cpu", device.type}:
        for shift in (0, 1, 4):
            room = torch.full((len(expected) + shift + 3,), 0xEE, dtype=torch.uint8, device=target)
            gather(sources, room[shift:-3])
            assert room.cpu().numpy().tobytes() == b"\xee" * shift + expected + b"\xee" * 3
    room = torch.empty(2 * len(expected) + 2, dtype=torch.uint8)
    for wrong in (room[: len(expected) + 1], room[: 2 * len(expected) : 2]):
        with pytest.raises(InternalError):
            gather(sources, wrong)


def test_scatter_gives_each_its_own_storage(device: torch.device) -> None:
    chunk = random_tensor(1000, torch.uint8, device)
    sizes = [1, 0, 499, 500]
    with torch.inference_mode():
        parts = scatter(chunk, sizes)
    assert [part.numel() for part in parts] == sizes
    assert not any(part.is_inference() for part in parts)
    assert len({part.untyped_storage().data_ptr() for part in parts if part.numel()}) == 3
    assert all(part.untyped_storage().nbytes() == part.numel() for part in parts)
    assert b"".join(physical_bytes(part) for part in parts) == physical_bytes(chunk)


def test_a_source_can_be_made_by_hand() -> None:
    x = torch.arange(4, dtype=torch.int32)
    source = ExtentSource(x.untyped_storage(), 4, 8, WordType.U32, x.device, 0, x)
    out = torch.empty(8, dtype=torch.uint8)
    source.copy_to(out)
    assert out.view(torch.int32).tolist() == [1, 2]


@st.composite
def _views(draw: st.DrawFn) -> list[torch.Tensor]:
    dtypes = [torch.uint8, torch.int16, torch.float32, torch.complex64, torch.float64, torch.complex128]
    raw = torch.arange(1024, dtype=torch.int16).view(torch.uint8)
    views = []
    for _ in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(dtypes))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        strides = [draw(st.integers(0, 12)) for _ in shape]
        reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
        offset = draw(st.integers(0, max(0, 2048 // dtype.itemsize - reach - 1)))
        base = torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), offset, shape, strides)
        views.append(base.conj() if dtype.is_complex and draw(st.booleans()) else base)
    return views


@given(_views())
@settings(deadline=None, max_examples=200)
def test_A10_any_views_of_one_storage_come_back(views: list[torch.Tensor]) -> None:
    table = describe(views)
    assert_same_bits(views, through(views))
    held = sum(view.numel() * view.itemsize for view in views)
    assert sum(table.extent_bytes) <= max(4 * held + 16 * len(views), 2048)

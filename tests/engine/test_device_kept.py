"""What is kept on a device for differences: whose it is, how much there is, and which residual is taken."""

from __future__ import annotations

import itertools

import pytest
import torch

import tidegate
from tidegate.codec.device import device_encoder_bytes
from tidegate.delta import DeltaPolicy
from tidegate.device_deltas import residual_codec_name, smallest
from tidegate.device_kept import DeviceKept
from tidegate.device_shapes import device_shapes, with_residual_codecs
from tidegate.options import kept_device_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_copy_belongs_to_the_attempt_that_it_was_made_for() -> None:
    kept = DeviceKept(1000, CPU)
    taken = kept.take(3, 100)
    assert taken is not None
    assert taken[0].shape == (100,)
    assert taken[1] == 0
    assert not kept.has("a", 3), "nothing is in it yet"
    kept.give("a", 3, 17)
    assert kept.has("a", 3)
    assert not kept.has("b", 3)
    again = kept.take(3, 100)
    assert again is not None
    assert again[0] is taken[0], "allocated once"
    assert again[1] == 17
    assert not kept.has("a", 3), "a save that fails from here on leaves no copy that could be taken for the base"


def test_what_has_no_room_is_not_kept() -> None:
    kept = DeviceKept(250, CPU)
    for chunk in (0, 1):
        assert kept.may_hold(chunk, 100)
        assert kept.take(chunk, 100) is not None
    assert not kept.may_hold(2, 100)
    assert kept.take(2, 100) is None
    kept.give("a", 2, 1)
    assert not kept.has("a", 2)
    assert kept.may_hold(0, 100)
    assert kept.may_hold(0, 150), "in the place of its own"
    assert not kept.may_hold(0, 151)
    assert kept.held_bytes == 200
    kept.drop(1)
    assert kept.held_bytes == 100
    assert kept.take(2, 150) is not None


def test_a_copy_of_another_length_is_replaced() -> None:
    kept = DeviceKept(250, CPU)
    assert kept.take(0, 200) is not None
    kept.give("a", 0, 5)
    taken = kept.take(0, 240)
    assert taken is not None
    assert taken[0].numel() == kept.held_bytes == 240
    assert taken[1] == 5, "the sum goes with the owner, who is gone"
    assert not kept.has("a", 0)


def test_where_one_copy_was_written_to_none_is_trusted() -> None:
    kept = DeviceKept(1000, CPU)
    for chunk in (0, 1):
        assert kept.take(chunk, 100) is not None
        kept.give("a", chunk, chunk)
    kept.distrust()
    assert not kept.has("a", 0)
    assert not kept.has("a", 1)
    assert kept.held_bytes == 200, "there is room for the next ones"


def test_the_smallest_is_taken_where_it_is_worth_it() -> None:
    assert smallest({None: 1000, "xor": 900, "difference": 800}) == "difference"
    assert smallest({None: 1000, "xor": 700, "difference": 800}) == "xor"
    assert smallest({None: 1000, "xor": 985, "difference": 990}) is None
    assert smallest({None: 1000, "xor": 1200}) is None
    assert smallest({None: 1000}) is None


def test_residuals_of_rans_have_their_mantissas_coded_too() -> None:
    assert residual_codec_name("rans") == "planes:mantissa=rans"
    assert residual_codec_name("raw") == "planes:mantissa=rans", "where the encoder has it: beside rans"
    assert residual_codec_name("zstd") == "zstd"
    assert with_residual_codecs(("rans", "raw")) == ("rans", "raw", "planes:mantissa=rans")
    assert with_residual_codecs(("zstd",)) == ("zstd",)


@pytest.mark.parametrize(
    ("policy", "room", "expected"),
    [
        (None, 1000, 0),
        (DeltaPolicy(), 1000, 250),
        (DeltaPolicy(keep_device_bytes=700), 1000, 700),
        (DeltaPolicy(keep_device_bytes=7000), 1000, 1000),
        (DeltaPolicy(keep_device_bytes=0), 1000, 0),
        (DeltaPolicy(), -5, 0),
        (DeltaPolicy(keep_device_bytes=10), -5, 0),
    ],
)
def test_how_much_may_be_kept(policy: DeltaPolicy | None, room: int, expected: int) -> None:
    assert kept_device_bytes(policy, room) == expected


@pytest.mark.parametrize("value", [-1, True, 1.5])
def test_a_limit_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(tidegate.ConfigError, match="keep_device_bytes"):
        DeltaPolicy(keep_device_bytes=value)  # type: ignore[arg-type]


def test_shapes_count_what_differences_take() -> None:
    chunk_bytes = 4 << 20
    plain = list(device_shapes(("rans", "raw"), chunk_bytes, GPU, verify=False))
    deltas = list(device_shapes(("rans", "raw"), chunk_bytes, GPU, verify=False, deltas=True))
    for before, after in zip(plain, deltas, strict=True):
        assert (before.num_lanes, before.num_slots, before.codecs) == (after.num_lanes, after.num_slots, after.codecs)
        names = with_residual_codecs(after.codecs)
        lane_bytes = device_encoder_bytes(names, chunk_bytes, after.num_slots, device=GPU)
        assert after.num_bytes > after.num_lanes * (lane_bytes + 2 * after.num_slots * chunk_bytes)
        assert after.num_bytes > before.num_bytes
    assert all(before.num_bytes > after.num_bytes for before, after in itertools.pairwise(deltas))

"""Classes of a user's own, as golden checkpoints name them. Never rename or move one."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple


@dataclasses.dataclass
class Config:
    """A mutable dataclass."""

    width: int
    names: list[str]


@dataclasses.dataclass(frozen=True, slots=False)
class Frozen:
    """A frozen one."""

    rate: float


class Pair(NamedTuple):
    """A namedtuple."""

    left: object
    right: object


class Colour(enum.Enum):
    """An Enum."""

    RED = 1
    GREEN = "g"


class Access(enum.Flag):
    """A Flag, whose combinations have no names."""

    READ = 1
    WRITE = 2


ALLOWED = [Config, Frozen, Pair, Colour, Access]

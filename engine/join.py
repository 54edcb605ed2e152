"""Join the ranks of a process group, if there is one. Without one, nothing of torch.distributed is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from .ranks import Ranks


def join_ranks(group: dist.ProcessGroup | None, *, deadline_s: float, silence_s: float) -> Ranks | None:
    """Connect this rank with the others of a group; None without one. Blocks until all have come.

    Raises:
        ConfigError: An argument is wrong.
    """
    if group is None:
        return None
    from .ranks import Ranks

    return Ranks(group, deadline_s=deadline_s, silence_s=silence_s)

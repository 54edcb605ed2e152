"""Join the ranks of a process group, if there is one. Without one, nothing of torch.distributed is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ConfigError
from .paths import shown

if TYPE_CHECKING:
    import torch.distributed as dist

    from .ranks import Ranks


def join_ranks(group: dist.ProcessGroup | None, *, deadline_s: float, silence_s: float) -> Ranks | None:
    """Connect this rank with the others of a group; None without one. Blocks until all have come.

    Raises:
        ConfigError: An argument is wrong.
    """
    if group is None:
        return None
    from torch.distributed import ProcessGroup

    from .ranks import Ranks

    if not isinstance(group, ProcessGroup):
        raise ConfigError(
            f"process_group is {shown(group)}; give a group of torch.distributed, such as dist.group.WORLD after "
            "init_process_group"
        )

    return Ranks(group, deadline_s=deadline_s, silence_s=silence_s)

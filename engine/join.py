"""Join the ranks of a process group, if there is one. Without one, nothing of torch.distributed is imported here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ConfigError
from .options import Options
from .paths import shown

if TYPE_CHECKING:
    import torch.distributed as dist

    from .ranks import Ranks


def join_ranks(group: dist.ProcessGroup | None, options: Options, deadline_s: float, silence_s: float) -> Ranks | None:
    """Connect this rank with the others of a group; None without one. Blocks until all have come.

    Args:
        group: The ranks.
        options: What the engine was asked for.
        deadline_s: How long a save may take on all ranks together.
        silence_s: A rank that shows no sign of life for so long has failed.

    Raises:
        ConfigError: An argument is wrong, or an option does not go with ranks. Nobody was waited for.
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
    options.check_for_ranks()
    return Ranks(group, deadline_s=deadline_s, silence_s=silence_s)

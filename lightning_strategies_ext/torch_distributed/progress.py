"""How far a rank is among the collectives of the default process group."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_strategies_ext.shm.process_group import ShmProcessGroup


class DefaultGroupProgress:
    """Says it of this process, see :class:`.failure.departure.Progress`.

    Args:
        cut_off: Lets the collective fail that this rank is in.
    """

    def __init__(self, cut_off: Callable[[], None]) -> None:
        self.cut_off = cut_off

    def num_begun(self) -> int:
        """How many collectives of the group this rank has begun; zero where its backend does not count."""
        group: Any = dist.group.WORLD
        if not dist.is_initialized() or isinstance(group, ShmProcessGroup):
            return 0
        try:
            return int(group._get_sequence_number_for_group())
        except RuntimeError:
            return 0

    def waiting_for(self) -> Any:
        """The operation of ``shm`` that this rank waits for, if it does."""
        group: Any = dist.group.WORLD
        return group.waiting_for if dist.is_initialized() and isinstance(group, ShmProcessGroup) else None

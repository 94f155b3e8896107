"""Progress of a rank in the collectives of the default process group."""

from typing import Any

import torch.distributed as dist

from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.shm.process_group import ShmProcessGroup


class DefaultGroupProgress(CollectiveProgress):
    """Progress of this process in the default group."""

    def num_started(self) -> int:
        """Returns how many collectives this rank has started in the group; 0 if the backend does not count them."""
        group: Any = dist.group.WORLD
        if not dist.is_initialized() or isinstance(group, ShmProcessGroup):
            return 0
        try:
            return int(group._get_sequence_number_for_group())
        except RuntimeError:
            return 0

    def pending_work(self) -> Any:
        """Returns the operation of ``shm`` that this rank waits for; None if there is none."""
        group: Any = dist.group.WORLD
        return group.current_work if dist.is_initialized() and isinstance(group, ShmProcessGroup) else None

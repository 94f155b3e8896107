"""Replaces gloo with ``shm`` in a process, for cases that select "gloo" by name.

Torch's cases depend on the name of the backend, so the name remains "gloo". Each gloo group for the CPU is created as a
``shm`` group: the default group, the groups of the cases, and torch's internal groups. Any other group raises an error,
so that no case passes over gloo unnoticed. ``dist.get_backend()`` returns "shm", and a few cases fail for this reason.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_strategies_ext.discovery import register_shm_backend


def replace_gloo() -> None:
    """Replaces gloo with ``shm`` for all groups that this process creates from now on."""
    register_shm_backend(distributed_c10d)
    from lightning_strategies_ext.shm.process_group import ShmProcessGroup

    # Torch creates all groups with this function, at least from 2.5 to 2.13; there is no public function.
    make_group = distributed_c10d._new_process_group_helper

    def make_group_of_shm(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any) -> Any:
        config = distributed_c10d.BackendConfig(dist.Backend(str(backend)))
        is_replaced = config.get_device_backend_map().get("cpu") == "gloo"
        group, store = make_group(size, rank, ranks, dist.Backend("shm") if is_replaced else backend, *args, **kwargs)
        if is_replaced and group is not dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, ShmProcessGroup):
            raise AssertionError(f"the group must have the backend 'shm', but is {group!r}")
        return group, store

    distributed_c10d._new_process_group_helper = make_group_of_shm

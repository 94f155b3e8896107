"""Puts ``shm`` in gloo's place in a process, for cases that say "gloo" themselves.

Torch's cases decide by the name of the backend what to run and what to expect. So for them the name stays "gloo", and
whenever a group of gloo's is to be made for the CPU, one of ``shm`` is made: for the default group, for the groups that
cases make, and for those that torch makes inside. A group that is not of ``shm`` then is an error, so that no case
passes by gloo in silence. ``dist.get_backend()`` gives "shm", which the few cases that ask for it do not like.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_strategies_ext.discovery import register_shm_backend


def replace_gloo() -> None:
    """From now on, each group of this process that would be gloo's is one of ``shm``."""
    register_shm_backend(distributed_c10d)
    from lightning_strategies_ext.shm.process_group import ShmProcessGroup

    # The one function through which torch makes all groups, from 2.5 to 2.13 at least; there is no public one.
    make_group = distributed_c10d._new_process_group_helper

    def make_group_of_shm(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **kwargs: Any) -> Any:
        config = distributed_c10d.BackendConfig(dist.Backend(str(backend)))
        is_replaced = config.get_device_backend_map().get("cpu") == "gloo"
        group, store = make_group(size, rank, ranks, dist.Backend("shm") if is_replaced else backend, *args, **kwargs)
        if is_replaced and group is not dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, ShmProcessGroup):
            raise AssertionError(f"the group should be of the backend 'shm', and is {group!r}")
        return group, store

    distributed_c10d._new_process_group_helper = make_group_of_shm

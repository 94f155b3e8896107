"""The ``shm`` process group: torch.distributed over shared memory, for CPU tensors of the ranks of one host."""

import sys
from typing import Any

NAME = "shm"


def is_available() -> bool:
    """Whether this operating system has what the group is made of."""
    return sys.platform == "linux"


def register() -> None:
    """Makes ``torch.distributed.init_process_group("shm")`` work. Costs microseconds; a second call does nothing."""
    import torch.distributed as dist

    if dist.is_available():
        register_with(dist.Backend)


def register_with(backends: Any) -> None:
    """Does the same while torch is still being imported, for who has its class ``Backend`` already."""
    if is_available() and not hasattr(backends, NAME.upper()):
        backends.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(torch_options: Any, options: Any) -> Any:
    from lightning_strategies_ext.shm.creation import create_process_group

    return create_process_group(torch_options, options)

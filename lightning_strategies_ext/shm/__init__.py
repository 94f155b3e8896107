"""The ``shm`` process group: torch.distributed over shared memory, for CPU tensors of the ranks of one host."""

import sys
from typing import Any

NAME = "shm"


def is_available() -> bool:
    """Whether this operating system has what the group is made of."""
    return sys.platform == "linux"


def register(backends: Any) -> None:
    """Makes ``torch.distributed.init_process_group("shm")`` work. Costs microseconds; a second call does nothing.

    Importing the package does it, see :mod:`lightning_strategies_ext.discovery`.

    Args:
        backends: torch's class ``Backend``, given since torch may still be importing itself.
    """
    if is_available() and not hasattr(backends, NAME.upper()):
        backends.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(torch_options: Any, options: Any) -> Any:
    from lightning_strategies_ext.shm.creation import create_process_group

    return create_process_group(torch_options, options)

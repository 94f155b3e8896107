"""The ``shm`` process group: torch.distributed over shared memory, for CPU tensors of the ranks of one host."""

import sys
from typing import Any

NAME = "shm"


def is_available() -> bool:
    """Returns whether this operating system supports the group; only Linux does."""
    return sys.platform == "linux"


def register(backends: Any) -> None:
    """Registers the backend ``shm`` with torch.distributed. Takes microseconds; repeated calls are no-ops.

    The import of this package calls it, see :mod:`lightning_strategies_ext.discovery`.

    Args:
        backends: torch's class ``Backend``, passed because torch may still be importing itself.
    """
    if is_available() and not hasattr(backends, NAME.upper()):
        backends.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(torch_options: Any, options: Any) -> Any:
    from lightning_strategies_ext.shm.creation import create_process_group

    return create_process_group(torch_options, options)

"""gloo backend of a ``shm`` process group, and the decorator that passes collectives to it."""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from lightning_strategies_ext.shm.tensors import NoStorageError

Collective = TypeVar("Collective", bound=Callable[..., Any])


class GlooFallback(dist.ProcessGroupGloo):
    """gloo backend of a ``shm`` process group.

    torch passes a new timeout only to this backend; it applies to the whole group.

    Args:
        store: Store of the group.
        rank: Rank of this process.
        size: Number of ranks.
        timeout: Timeout of each operation.

    Attributes:
        timeout: Current timeout of each operation.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self.timeout = timeout

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        self.timeout = timeout


class CombinedWork(dist.Work):
    """Several handles of gloo as one handle."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def is_completed(self) -> bool:
        """Returns whether all operations have ended."""
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for one operation after the other; the timeout applies to each."""
        for work in self._works:
            work.wait() if timeout <= timedelta(0) else work.wait(timeout)
        return True


def refuse_reconfiguration(group: Any, *args: Any) -> Any:
    """Rejects a change of the ranks of a group, which torch 2.14 and later would pass to gloo alone.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        "A `shm` process group cannot change its ranks: the group has the memory of the ranks that created it. Create a"
        ' new group, or use the backend "gloo".'
    )


def with_dispatcher_fallback(name: str) -> Callable[[Collective], Collective]:
    """Makes a collective call gloo through torch's dispatcher for tensors that only the dispatcher supports.

    Args:
        name: Name of the collective as a method of torch's own process groups.
    """

    def decorate(collective: Collective) -> Collective:
        @functools.wraps(collective)
        def wrapper(group: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return collective(group, *args, **kwargs)
            except NoStorageError:
                return getattr(group.gloo, name)(*args, **kwargs)

        return cast(Collective, wrapper)

    return decorate

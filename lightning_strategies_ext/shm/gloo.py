"""The gloo group beside a ``shm`` one: what it is told, and what is handed to it."""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from lightning_strategies_ext.shm.tensors import HasNoMemoryError

Collective = TypeVar("Collective", bound=Callable[..., Any])


class GlooBeside(dist.ProcessGroupGloo):
    """The gloo backend beside a group. It is what torch tells of a new timeout, which is the whole group's.

    Args:
        store: The group's.
        rank: Of this process.
        size: Number of ranks.
        timeout: Of each operation.

    Attributes:
        timeout: The same, as it is now.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self.timeout = timeout

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        self.timeout = timeout


class AllOf(dist.Work):
    """Several of its handles as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for one after the other, for each as long."""
        for work in self._works:
            work.wait() if timeout <= timedelta(0) else work.wait(timeout)
        return True


def or_by_dispatcher(name: str) -> Callable[[Collective], Collective]:
    """Hands over to gloo, by torch's dispatcher, a collective that meets a tensor which only the dispatcher can take.

    Args:
        name: Of the collective, as a method of torch's own process groups.
    """

    def decorate(collective: Collective) -> Collective:
        @functools.wraps(collective)
        def carried_out(group: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return collective(group, *args, **kwargs)
            except HasNoMemoryError:
                return getattr(group.gloo, name)(*args, **kwargs)

        return cast(Collective, carried_out)

    return decorate

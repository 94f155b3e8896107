"""A ``shm`` process group whose collectives torch's flight recorder records, if torch is 2.15 or later.

torch records a collective when its dispatcher executes it. It calls a process group with a Python class without the
dispatcher. A recorded group therefore calls each collective of a second group of torch through the dispatcher. The
backend of that group executes the collective of the ``shm`` group.
"""

# torch's stubs describe another constructor of its process group.
# mypy: disable-error-code="call-arg"

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend  # no public name; instances require torch 2.15

from lightning_strategies_ext._system import flight_recorder
from lightning_strategies_ext.shm.process_group import ShmProcessGroup
from lightning_strategies_ext.shm.work import ShmWork

#: Collectives that torch calls, each with the names that it has had.
_COLLECTIVES: Final = {
    "all_gather_single": ["_allgather_base"],
    "all_gather_single_coalesced": ["allgather_into_tensor_coalesced"],
    "all_to_all_single": ["alltoall_base"],
    "allgather": [],
    "allgather_coalesced": [],
    "allreduce": [],
    "allreduce_coalesced": [],
    "alltoall": [],
    "barrier": [],
    "broadcast": [],
    "gather": [],
    "recv": [],
    "recv_anysource": [],
    "reduce": [],
    "reduce_scatter": [],
    "reduce_scatter_single": ["_reduce_scatter_base"],
    "reduce_scatter_single_coalesced": ["reduce_scatter_tensor_coalesced"],
    "scatter": [],
    "send": [],
}

Collective = Callable[..., Any]


class _CallingBackend(Backend):
    """Backend whose collectives call a given function, which each thread sets for its next collective.

    Attributes:
        call: Function of this thread, and its result.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.call = threading.local()
        # torch's own property would call itself indefinitely (torch 2.15).
        self._options = self.Options("shm", timeout)

    @property
    def options(self) -> Any:
        """Options, of which the recorder reads the timeout."""
        return self._options

    def getBackendName(self) -> str:  # noqa: N802 - as torch calls it
        """Returns the name under which the flight recorder records collectives."""
        return "shm"

    def execute(self, *args: Any) -> Any:
        """Calls the function of this thread."""
        self.call.result = self.call.function(*args)
        return self.call.result


for _name in _COLLECTIVES:
    setattr(_CallingBackend, _name, _CallingBackend.execute)


class RecordedShmProcessGroup(ShmProcessGroup):
    """A ``shm`` process group whose collectives the flight recorder records.

    An entry is retired when the call returns, so the entry of a collective that waits for other ranks is not retired.

    Args:
        arguments: Arguments of :class:`.ShmProcessGroup`.
        timeout: Timeout that the recorder stores with each collective.
        global_ranks: Ranks of the group in the default group, in the order of the group.
    """

    def __init__(self, *arguments: Any, timeout: timedelta, global_ranks: Sequence[int]) -> None:
        super().__init__(*arguments)
        rank, size = self.rank(), self.size()
        self._calling = _CallingBackend(rank, size, timeout)
        self._dispatched = dist.ProcessGroup(rank, size)
        custom = dist.ProcessGroup.BackendType.CUSTOM
        self._dispatched._register_backend(torch.device("cpu"), custom, self._calling)
        self._dispatched._set_default_backend(custom)
        self._global_ranks = list(global_ranks)
        self._hook: Any = None

    def _set_group_name(self, name: Any) -> None:
        super()._set_group_name(name)
        self._dispatched._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        """Starts the recording: torch sets the name and then the description before the first collective."""
        super()._set_group_desc(description)
        self._dispatched._set_group_desc(description)
        self._hook = flight_recorder.hook_class().attach(self._dispatched, self._global_ranks)

    def all_reduce_into(self, copies: Any, tensor: Tensor, opts: dist.AllreduceOptions) -> ShmWork:
        """Does the same as :meth:`.ShmProcessGroup.all_reduce_into`."""
        into = functools.partial(super().all_reduce_into, copies, tensor, opts)
        work: ShmWork = self._record("allreduce", lambda *_: into(), [tensor], opts)
        return work

    def _record(self, name: str, function: Collective, *args: Any, **kwargs: Any) -> Any:
        """Calls a function with the arguments of a collective in torch's long form, and records the call.

        Returns:
            The result of the function; that of torch if the dispatcher has not called it, for example while tracing.
        """
        call = self._calling.call
        call.function, call.result = function, None
        try:
            work = getattr(self._dispatched, name)(*args, **kwargs)
            return work if call.result is None else call.result
        finally:
            call.function = call.result = None


def _recorded(name: str) -> Collective:
    function = getattr(ShmProcessGroup, name)

    @functools.wraps(function)
    def collective(self: RecordedShmProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return self._record(name, functools.partial(function, self), *args, **kwargs)

    return collective


for _name, _earlier_names in _COLLECTIVES.items():
    for _each in (_name, *_earlier_names):
        setattr(RecordedShmProcessGroup, _each, _recorded(_name))

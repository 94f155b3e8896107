"""Start of operations: flattens the tensors of a collective, and starts its rounds or its native all-reduce."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from lightning_strategies_ext.identities import current
from lightning_strategies_ext.shm.algorithms import Plan
from lightning_strategies_ext.shm.blocking_times import recorded
from lightning_strategies_ext.shm.executor import OperationExecutor, deadline_of, is_asynchronous
from lightning_strategies_ext.shm.gloo_fallback import GlooFallback
from lightning_strategies_ext.shm.operation_ids import CollectiveKind, checksum_of, operation_id
from lightning_strategies_ext.shm.rounds import Rounds
from lightning_strategies_ext.shm.tensors import flat, with_copy_back
from lightning_strategies_ext.shm.work import OperationSteps, ShmWork, Waitable

_NOT_RECORDED: Final[AbstractContextManager[Any]] = nullcontext()


class OperationStarter:
    """Starts the operations of one process group, except those that the executor starts without rounds.

    Args:
        executor: Object that executes operations.
        rounds: Rounds of the ranks of this host.
        backend: gloo backend of the group, which has the timeout of operations.
    """

    def __init__(self, executor: OperationExecutor, rounds: Rounds, backend: GlooFallback) -> None:
        self._executor = executor
        self._rounds = rounds
        self._backend = backend

    def start(
        self,
        kind: CollectiveKind,
        make_plan: Callable[[Sequence[Tensor]], Plan],
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        opts: Any,
        *,
        op: Any = None,
        root: int = 0,
        written: Sequence[Tensor] | None = None,
    ) -> ShmWork:
        """Starts a collective that consists of rounds.

        Args:
            kind: Kind of the collective.
            make_plan: Function that returns the plan for the flattened tensors.
            tensors: All tensors that the collective reads or writes.
            outputs: Tensors that the future returns.
            opts: Options of the caller.
            op: Reduction operator, or None.
            root: Rank of the root in the group, if the collective has one.
            written: Tensors that this rank modifies; the outputs if None.
        """
        name = kind.name.lower()
        with torch.inference_mode():
            flats = [flat(tensor, name) for tensor in tensors]
            steps, lookahead = make_plan(flats)
        deadline = deadline_of(opts, self._backend.timeout)
        call = operation_id(kind, flats, getattr(op, "op", op), root)
        # Barriers may have different identities, for example if rank 0 runs code before the other ranks.
        identity = 0 if kind == CollectiveKind.BARRIER else current.identity
        # A gather to a list has one more tensor than outputs, all of one size.
        is_coalesced = len(outputs) > 1 and len(flats) != len(outputs) + 1
        checksum = checksum_of(outputs) if is_coalesced else 0
        progress = self._rounds.run(call, steps, lookahead, deadline, identity, checksum)
        changed = outputs if written is None else written
        return self.start_steps(name, progress, self._rounds, flats, tensors, changed, deadline, opts, outputs)

    def start_steps(
        self,
        name: str,
        progress: OperationSteps,
        waitable: Waitable,
        flats: Sequence[Tensor],
        tensors: Sequence[Tensor],
        written: Sequence[Tensor],
        deadline: float,
        opts: Any,
        outputs: Sequence[Tensor] | None = None,
    ) -> ShmWork:
        """Starts an operation that the given generator executes.

        Args:
            name: Name of the operation, for messages.
            progress: Generator that executes the operation on the flattened tensors.
            waitable: Object that waits for other ranks.
            flats: The flattened tensors.
            tensors: All tensors that the operation reads or writes, each of which has one flattened tensor.
            written: Tensors that this rank modifies.
            deadline: Time on the monotonic clock until which the operation waits for other ranks, in seconds.
            opts: Options of the caller.
            outputs: Tensors that the future returns; those that this rank modifies if None.
        """
        if any(row.data_ptr() != tensor.data_ptr() for row, tensor in zip(flats, tensors, strict=True)):
            progress = with_copy_back(progress, flats, tensors, written)
        filled = list(written if outputs is None else outputs)
        work = ShmWork(name, progress, waitable, filled, deadline, self._executor)
        with record_call(name):
            self._executor.start(work, is_asynchronous(opts))
        return work


def record_call(name: str) -> AbstractContextManager[Any]:
    """Returns a context that records the call of a collective, for torch's profiler and for :mod:`.blocking_times`."""
    return recorded(
        torch.profiler.record_function(f"shm:{name}") if torch.autograd._profiler_enabled() else _NOT_RECORDED
    )

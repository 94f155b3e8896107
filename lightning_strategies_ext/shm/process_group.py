"""The ``shm`` process group: torch.distributed's collectives for CPU tensors of the ranks of one host.

A gloo group executes the other operations: point-to-point, all-to-all, sparse tensors, ``allgather_coalesced``, and
future operations of torch. Tensors whose memory cannot be read are passed to gloo through torch's dispatcher: gloo
rejects a DTensor, and tracing works as with gloo. With several hosts, an all-reduce uses shared memory inside each
host, and gloo between the host leaders. All other collectives over several hosts use gloo only.
"""
# torch's stubs describe calls of a C++ class; torch.distributed calls a Python class only with these signatures.
# mypy: disable-error-code="override,assignment,call-arg"

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from lightning_strategies_ext.identities import current
from lightning_strategies_ext.shm import algorithms
from lightning_strategies_ext.shm.algorithms import Plan
from lightning_strategies_ext.shm.executor import OperationExecutor, deadline_of
from lightning_strategies_ext.shm.gloo_fallback import (
    CombinedWork,
    GlooFallback,
    refuse_reconfiguration,
    with_dispatcher_fallback,
)
from lightning_strategies_ext.shm.hierarchical_all_reduce import HierarchicalAllReduce
from lightning_strategies_ext.shm.native import NativeAllReduce, SharedCopies
from lightning_strategies_ext.shm.operation_ids import CollectiveKind
from lightning_strategies_ext.shm.operations import OperationStarter, record_call
from lightning_strategies_ext.shm.reduction import Reduction
from lightning_strategies_ext.shm.rounds import Rounds
from lightning_strategies_ext.shm.single_tensor_forms import accept_single_tensor
from lightning_strategies_ext.shm.tensors import check_one_part_per_rank, flat, is_plain, is_tracing
from lightning_strategies_ext.shm.work import ShmWork, work_per_tensor


class ShmProcessGroup(dist.ProcessGroup):
    """A process group whose ranks share memory, created by :func:`.creation.create_process_group`.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        executor: Object that executes operations.
        rounds: Rounds of the ranks of this host.
        native: All-reduce of the native library among the ranks of this host, faster than rounds; None without it.
        share_memory: Function that maps memory of a size in bytes for :meth:`share_memory`.
        gloo: Backend of all ranks, for other operations.
        leaders: gloo group of the host leaders; None if there is one host, or this rank is not a host leader.

    Attributes:
        gloo: torch's own process group with the backend ``gloo``.
        spans_hosts: Whether the ranks are on several hosts.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        executor: OperationExecutor,
        rounds: Rounds,
        native: NativeAllReduce | None,
        share_memory: Callable[[int], list[Tensor]],
        gloo: GlooFallback,
        leaders: Any,
    ) -> None:
        super().__init__(rank, size)
        # torch passes methods that are not overridden to the backend of the tensors' device. For a group with a Python
        # class, such as this one, this occasionally deadlocks on the GIL; for other groups it does not.
        self.gloo = dist.ProcessGroup(rank, size)
        for group in (self, self.gloo):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            if hasattr(group, "_set_default_backend"):  # the hooks that torch 2.15 attaches require it
                group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._backend = gloo
        self._executor = executor
        self._rounds = rounds
        starter = OperationStarter(executor, rounds, gloo)
        self._start, self._start_steps = starter.start, starter.start_steps
        self._hierarchical = HierarchicalAllReduce(rounds, native, leaders)
        self.spans_hosts = rounds.size < size
        self._native = None if self.spans_hosts else native
        self._share_memory = share_memory
        self._finalizer = weakref.finalize(self, executor.close)

    def getBackendName(self) -> str:  # noqa: N802 - as torch calls it
        """Returns the name of the backend, "shm"."""
        return "shm"

    @property
    def is_compiled(self) -> bool:
        """Whether the native library runs all-reduces, at least of float32 and float64 tensors."""
        return self._native is not None

    def share_memory(self, num_bytes: int) -> list[Tensor]:
        """Maps further shared memory of each rank. Collective: all ranks call it.

        Args:
            num_bytes: Size of each rank's memory, in bytes.

        Returns:
            Memory of each rank, in rank order, as zeros of dtype uint8. It is freed with the tensors of all ranks.

        Raises:
            MemoryError: On all ranks, if a rank cannot allocate its memory in ``/dev/shm``, or if the memory of all
                ranks exceeds half of the free space.
            DistBackendError: If a rank has exited.
            TimeoutError: If a rank does not call it before the timeout.
            ValueError: On all ranks, if they are on several hosts.
        """
        return self._share_memory(num_bytes)

    def all_reduce_into(self, copies: SharedCopies, tensor: Tensor, opts: dist.AllreduceOptions) -> ShmWork:
        """Reduces a tensor over all ranks into memory that they share. Does not modify the tensor.

        Args:
            copies: Memory for the result, of the size and dtype of the tensor.
            tensor: Contiguous, nonempty tensor on the CPU; may be this rank's copy, which receives the result.
            opts: Options with the operator SUM or AVG.

        Raises:
            torch.distributed.DistBackendError: If a synchronous operation has failed; the handle of an asynchronous
                operation raises this error instead.
        """
        assert self._native is not None
        with record_call("all_reduce"):
            return self._executor.all_reduce(self._native, tensor, opts, self._backend.timeout, copies)

    @property
    def current_work(self) -> ShmWork | None:
        """The first operation of this rank that has started and not ended, or None."""
        return self._executor.current_work

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations that are started later."""
        self._backend._set_default_timeout(timeout)

    def shutdown(self) -> None:
        """Leaves the group. Operations in progress fail, except those that gloo performs. Later calls are no-ops."""
        self._finalizer()

    def abort(self) -> None:
        """Does the same as :meth:`shutdown`."""
        self._finalizer()

    supports_reconfigure = property(lambda _: False)
    get_reconfigure_handle = reconfigure = refuse_reconfiguration

    # --- collectives, as torch.distributed calls them ---

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        """Reduces a tensor over all ranks, in place."""
        native = self._native
        # Nearly all calls take this path. It is short, because a large tensor evicts its code from the core's caches.
        match args:
            case [[tensor], opts] if native is not None and type(opts) is dist.AllreduceOptions:
                is_simple = is_plain(tensor) and tensor.is_cpu and tensor.is_contiguous()
                if is_simple and native.supports(tensor, opts.reduceOp):
                    with record_call("all_reduce"):
                        return self._executor.all_reduce(native, tensor, opts, self._backend.timeout)
        return self._all_reduce(*args, **kwargs)

    @accept_single_tensor(dist.AllreduceOptions, ["tensors"], ["op", "timeout"])
    @with_dispatcher_fallback("allreduce")
    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        if tensors[0].layout != torch.strided:
            return self.gloo.allreduce(list(tensors), opts or dist.AllreduceOptions())
        return self._all_reduce_coalesced(tensors, opts or dist.AllreduceOptions())

    @with_dispatcher_fallback("allreduce_coalesced")
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """Reduces tensors over all ranks, in place."""
        return work_per_tensor(self._all_reduce_coalesced(tensors, opts or dist.AllreduceCoalescedOptions()), tensors)

    def _all_reduce_coalesced(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        if self.spans_hosts:
            flats = [flat(tensor, "all_reduce") for tensor in tensors]
            reductions = [self._reduction(opts, row) for row in flats]
            deadline = deadline_of(opts, self._backend.timeout)
            progress = self._hierarchical.run(flats, reductions, deadline, current.identity)
            return self._start_steps(
                "all_reduce", progress, self._hierarchical, flats, tensors, tensors, deadline, opts
            )
        native = self._native
        if native is not None and all(native.supports(tensor, opts.reduceOp) for tensor in tensors):
            flats = [flat(tensor, "all_reduce") for tensor in tensors]
            progress = native.run([native.prepare(row, opts.reduceOp) for row in flats])
            deadline = deadline_of(opts, self._backend.timeout)
            return self._start_steps("all_reduce", progress, native, flats, tensors, tensors, deadline, opts)

        def plan(flats: Sequence[Tensor]) -> Plan:
            return algorithms.concatenate_plans(
                [algorithms.all_reduce(self._rounds, row, self._reduction(opts, row)) for row in flats]
            )

        return self._start(CollectiveKind.ALL_REDUCE, plan, tensors, tensors, opts, op=opts.reduceOp)

    @accept_single_tensor(dist.ReduceOptions, ["tensor"], ["root", "op", "timeout"])
    @with_dispatcher_fallback("reduce")
    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """Reduces a tensor over all ranks, in place on the root."""
        opts = opts or dist.ReduceOptions()
        if self.spans_hosts:
            return self.gloo.reduce(list(tensors), opts)

        def plan(flats: Sequence[Tensor]) -> Plan:
            return algorithms.reduce(self._rounds, flats[0], opts.rootRank, self._reduction(opts, flats[0]))

        written = tensors if self.rank() == opts.rootRank else []
        return self._start(
            CollectiveKind.REDUCE, plan, tensors, tensors, opts, op=opts.reduceOp, root=opts.rootRank, written=written
        )

    @accept_single_tensor(dist.BroadcastOptions, ["tensor"], ["root", "timeout"])
    @with_dispatcher_fallback("broadcast")
    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        """Copies the root's tensor to all ranks."""
        opts = opts or dist.BroadcastOptions()
        if self.spans_hosts:
            return self.gloo.broadcast(list(tensors), opts)

        def plan(flats: Sequence[Tensor]) -> Plan:
            return algorithms.broadcast(self._rounds, flats[0], opts.rootRank)

        written = [] if self.rank() == opts.rootRank else tensors
        return self._start(CollectiveKind.BROADCAST, plan, tensors, tensors, opts, root=opts.rootRank, written=written)

    @accept_single_tensor(AllgatherOptions, ["output_tensors", "input_tensor"], ["timeout"])
    @with_dispatcher_fallback("allgather")
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Copies each rank's tensor to all ranks."""
        opts = opts or AllgatherOptions()
        is_uneven = any(output.numel() != inputs[0].numel() for output in outputs[0])
        if self.spans_hosts or is_uneven or len(outputs[0]) != self.size():
            return self.gloo.allgather([list(outputs[0])], list(inputs), opts)

        def plan(flats: Sequence[Tensor]) -> Plan:
            return algorithms.all_gather(self._rounds, flats[1:], flats[0])

        tensors = [inputs[0], *outputs[0]]
        return self._start(CollectiveKind.ALL_GATHER, plan, tensors, outputs[0], opts)

    @with_dispatcher_fallback("_allgather_base")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Concatenates the tensors of all ranks into one tensor, on all ranks."""
        if self.spans_hosts:
            return self.gloo._allgather_base(output, input, opts or AllgatherOptions())
        return self._all_gather_singles([output], [input], opts)

    @with_dispatcher_fallback("allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Does the same as :meth:`all_gather_single` for several tensors."""
        return work_per_tensor(self._all_gather_singles(outputs, inputs, opts), outputs)

    def _all_gather_singles(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        opts = opts or AllgatherOptions()
        check_one_part_per_rank(outputs, inputs, self.size(), "output")
        if self.spans_hosts:
            return CombinedWork([self.gloo._allgather_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

        def plan(flats: Sequence[Tensor]) -> Plan:
            pairs = zip(flats[: len(outputs)], flats[len(outputs) :], strict=True)
            return algorithms.concatenate_plans(
                [
                    algorithms.all_gather(self._rounds, into.view(self.size(), row.numel()).unbind(), row)
                    for into, row in pairs
                ]
            )

        return self._start(CollectiveKind.ALL_GATHER, plan, [*outputs, *inputs], outputs, opts)

    @accept_single_tensor(dist.GatherOptions, ["output_tensors", "input_tensor"], ["root", "timeout"])
    @with_dispatcher_fallback("gather")
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Copies each rank's tensor to the root."""
        opts = opts or dist.GatherOptions()
        if self.spans_hosts:
            return self.gloo.gather([list(output) for output in outputs], list(inputs), opts)
        into = list(outputs[0]) if self.rank() == opts.rootRank else []
        if any(output.numel() != inputs[0].numel() for output in into):
            raise ValueError("gather: the tensors in `gather_list` must have the size of `tensor`.")

        def plan(flats: Sequence[Tensor]) -> Plan:
            return algorithms.all_gather(self._rounds, flats[1:], flats[0], readers=[opts.rootRank])

        return self._start(CollectiveKind.GATHER, plan, [inputs[0], *into], into, opts, root=opts.rootRank)

    @accept_single_tensor(dist.ScatterOptions, ["output_tensor", "input_tensors"], ["root", "timeout"])
    @with_dispatcher_fallback("scatter")
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        """Copies the root's i-th tensor to rank i."""
        opts = opts or dist.ScatterOptions()
        if self.spans_hosts:
            return self.gloo.scatter(list(outputs), [list(tensors) for tensors in inputs], opts)
        parts = list(inputs[0]) if self.rank() == opts.rootRank else []
        if any(part.numel() != outputs[0].numel() for part in parts):
            raise ValueError("scatter: the tensors in `scatter_list` must have the size of `tensor`.")

        def plan(flats: Sequence[Tensor]) -> Plan:
            return algorithms.scatter(self._rounds, flats[0], flats[1:], opts.rootRank)

        return self._start(CollectiveKind.SCATTER, plan, [outputs[0], *parts], outputs, opts, root=opts.rootRank)

    @accept_single_tensor(dist.ReduceScatterOptions, ["output", "input"], ["op", "timeout"])
    @with_dispatcher_fallback("reduce_scatter")
    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        """Reduces each tensor over all ranks; rank i receives the result of the i-th tensor."""
        opts = opts or dist.ReduceScatterOptions()
        is_uneven = any(part.numel() != outputs[0].numel() for part in inputs[0])
        if self.spans_hosts or is_uneven:
            return self.gloo.reduce_scatter(list(outputs), [list(tensors) for tensors in inputs], opts)

        def plan(flats: Sequence[Tensor]) -> Plan:
            return algorithms.reduce_scatter(self._rounds, flats[0], flats[1:], self._reduction(opts, flats[0]))

        tensors = [outputs[0], *inputs[0]]
        return self._start(CollectiveKind.REDUCE_SCATTER, plan, tensors, outputs, opts, op=opts.reduceOp)

    @with_dispatcher_fallback("_reduce_scatter_base")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Reduces a tensor over all ranks; rank i receives the i-th part of the result."""
        return self._reduce_scatter_singles([output], [input], opts)

    @with_dispatcher_fallback("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        """Does the same as :meth:`reduce_scatter_single` for several tensors."""
        return work_per_tensor(self._reduce_scatter_singles(outputs, inputs, opts), outputs)

    def _reduce_scatter_singles(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        check_one_part_per_rank(inputs, outputs, self.size(), "input")
        if self.spans_hosts:
            return CombinedWork(
                [self.gloo._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
            )

        def plan(flats: Sequence[Tensor]) -> Plan:
            pairs = zip(flats[: len(outputs)], flats[len(outputs) :], strict=True)
            return algorithms.concatenate_plans(
                [
                    algorithms.reduce_scatter(
                        self._rounds, into, row.view(self.size(), -1).unbind(), self._reduction(opts, row)
                    )
                    for into, row in pairs
                ]
            )

        return self._start(CollectiveKind.REDUCE_SCATTER, plan, [*outputs, *inputs], outputs, opts, op=opts.reduceOp)

    @accept_single_tensor(dist.BarrierOptions, [], ["timeout"])
    def barrier(self, opts: Any = None) -> Any:
        """Waits until all ranks have started the barrier."""
        opts = opts or dist.BarrierOptions()
        if self.spans_hosts or is_tracing():
            return self.gloo.barrier(opts)
        return self._start(CollectiveKind.BARRIER, lambda _: algorithms.barrier(self._rounds), [], [], opts)

    # --- operations of gloo ---

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        """Sends the i-th part of a tensor to rank i."""
        return self.gloo.alltoall_base(output, input, output_sizes, input_sizes, opts or dist.AllToAllOptions())

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Sends the i-th tensor to rank i."""
        return self.gloo.alltoall(list(outputs), list(inputs), opts or dist.AllToAllOptions())

    def allgather_coalesced(self, outputs: Sequence[Any], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """Copies the tensors of each rank to all ranks."""
        return self.gloo.allgather_coalesced(list(outputs), list(inputs), opts or AllgatherOptions())

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> Any:
        """Sends a tensor to one rank."""
        return self.gloo.send(list(tensors), dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> Any:
        """Receives a tensor from one rank."""
        return self.gloo.recv(list(tensors), src, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Any:
        """Receives a tensor from any rank."""
        return self.gloo.recv_anysource(list(tensors), tag)

    # Names in torch before 2.13.
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduction(self, opts: Any, tensor: Tensor) -> Reduction:
        return Reduction(opts.reduceOp, tensor.dtype, self.size())

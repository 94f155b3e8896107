"""ParallelStrategy: base class of Fabric's multi-process strategies.

When a rank fails or does not start, all ranks exit. Fabric has no hook for an exception in the user's loop. In a
script, ``sys.excepthook`` receives uncaught exceptions; in a worker, its task does. For stops after a signal, the loop
calls ``coordinated_stop``.
"""

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies import ParallelStrategy as FabricParallelStrategy
from torch import Tensor
from torch.distributed import Store
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_strategies_ext._lightning.samplers import repeat_no_samples, share_orders
from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.arguments import barrier_name, check_hang_timeout
from lightning_strategies_ext.checkpoints import atomic_checkpoint_io
from lightning_strategies_ext.checks import ChecksOptions, check_fabric_checks
from lightning_strategies_ext.collective_comparison import compare_collectives
from lightning_strategies_ext.collectives import Collectives
from lightning_strategies_ext.collectives.sampler_order import SharedOrder
from lightning_strategies_ext.failure.failure_report import texts_of_exception
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.launch.script_launcher import environment_of_child, get_exit_code
from lightning_strategies_ext.registry import describe, register_strategies
from lightning_strategies_ext.renamed import RenamedAttribute
from lightning_strategies_ext.stage_context import StageContext

T = TypeVar("T")


class ParallelStrategy(FabricParallelStrategy, ABC):
    """Base class of Fabric's multi-process strategies; precedes Lightning's class among the base classes.

    Args:
        *args: Positional arguments of the next base class.
        cluster_environment: Source of ranks and addresses; detected if None.
        hang_timeout: Time that ranks wait in a collective for an inactive rank, in seconds or as a ``timedelta``; None
            for no limit.
        checks: Options of the checks, of which Fabric supports ``check_collectives``; no checks if None.
        **kwargs: Further arguments of the next base class.

    Attributes:
        collectives: Collectives of the engine.
    """

    collectives: Collectives
    _is_exact = False  # inside `exact_evaluation`
    checkpoint_io = atomic_checkpoint_io

    def __init__(
        self,
        *args: Any,
        cluster_environment: ClusterEnvironment | None,
        hang_timeout: float | timedelta | None,
        checks: ChecksOptions | None = None,
        **kwargs: Any,
    ) -> None:
        self._check_collectives = check_fabric_checks(checks).check_collectives
        self._hang_timeout_s = check_hang_timeout(hang_timeout)
        self._stage_context = StageContext(self._engine)
        kwargs["cluster_environment"] = environment_of_child(cluster_environment)
        super().__init__(*args, **kwargs)

    register_strategies = register_strategies
    __repr__ = describe
    stopping_together = RenamedAttribute("coordinated_stop")
    has_met = RenamedAttribute("has_joined")
    note_failure = RenamedAttribute("announce_failure")
    explained = RenamedAttribute("explain_exception")

    # --- collectives ---

    @override
    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over ranks in one round trip, see :meth:`.Collectives.reduce`."""
        return self.collectives.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor per rank, see :meth:`.Collectives.all_gather`."""
        return self.collectives.all_gather(tensor, group, sync_grads)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """Returns the object of rank ``src`` on every rank; small objects take one round trip."""
        return self.collectives.broadcast(obj, src)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits until all ranks have called it. An optional name is shown in the error if it fails."""
        self.collectives.barrier(barrier_name(*args, **kwargs))

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns whether the decision is True on all ranks, or with ``all=False`` on any rank."""
        return self.collectives.reduce_boolean_decision(decision, all)

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Replaces the order of a user's random sampler with rank 0's order, see :class:`.SharedOrder`.

        Inside :meth:`exact_evaluation`, it also makes the DataLoader return each sample on one rank only.
        """
        share_orders(dataloader, lambda sampler: SharedOrder(sampler, self.broadcast, epoch=0))
        is_exact = self._is_exact and self.world_size > 1
        return ExactLoader(dataloader, self._sync_buffers_of_evaluation) if is_exact else dataloader

    # --- evaluation ---

    @contextmanager
    def exact_evaluation(self) -> Iterator[None]:
        """Makes DataLoaders that are set up in the block return each sample on one rank only, for evaluations.

        Otherwise, distributed samplers repeat samples so that all ranks have the same number::

            with fabric.strategy.exact_evaluation():
                loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8))

        Ranks may have different numbers of batches, or none. All ranks iterate over the DataLoader, under
        ``torch.no_grad()``, call no collectives in the loop, and reduce sums and counts after it.
        """
        before, self._is_exact = self._is_exact, True
        try:
            yield
        finally:
            self._is_exact = before

    @abstractmethod
    def _sync_buffers_of_evaluation(self) -> None:
        """Exchanges buffers in place of the first forward pass of an evaluation, which some ranks may not run."""

    # --- failures, stops ---

    @property
    def has_joined(self) -> bool:
        """Whether this process has joined other ranks; False for a rank without peers."""
        return self._stage_context.failure_monitor is not None

    def announce_failure(self, exception: BaseException) -> None:
        """Announces to the other ranks that this rank has failed, and kills ranks of this host that do not exit.

        Ctrl-C is not a failure: all ranks receive it.
        """
        context = self._stage_context
        context.mark_failed(exception, context.rank, context.size)
        if context.failure_monitor is not None and not isinstance(exception, KeyboardInterrupt):
            context.failure_monitor.fail_and_kill_local_peers(texts_of_exception(exception)[1])

    def explain_exception(self, exception: BaseException) -> BaseException:
        """Returns the exception to show: the given one, or the failure of another rank that made a collective raise."""
        return self._stage_context.explain_exception(exception)

    @contextmanager
    def coordinated_stop(self, signum: int = signal.SIGTERM) -> Iterator[Callable[[], bool]]:
        """Makes a signal on any rank stop the loops of all ranks before the same step, without blocking training.

        All ranks enter the block, and call the yielded function before each step::

            with fabric.strategy.coordinated_stop() as should_stop:
                for batch in loader:
                    if should_stop():
                        fabric.save("stopped.ckpt", state)
                        break
                    ...

        The block restores the previous signal handler at its end. If this rank has received the signal after its last
        call of the function, the block then raises the signal again.

        Args:
            signum: Number of the signal. Schedulers send SIGTERM, or a configured signal, before they preempt a host.

        Yields:
            Function without arguments that returns whether to stop, with the same result for the same call on all
            ranks. It waits for the other ranks only after a rank has received the signal.

        Raises:
            RuntimeError: If it is called before ``fabric.launch()``, or not in the main thread, which handles signals
                in Python.
        """
        context = self._stage_context
        if self.world_size > 1 and not self.has_joined:
            raise RuntimeError(
                "`coordinated_stop` was called before the ranks were connected. Call `fabric.launch()` first."
            )
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "`coordinated_stop` was called in a thread that cannot handle signals. Call it in the main thread."
            )
        stop = context.coordinated_stop
        previous_handler = signal.signal(signum, lambda *_: stop.request())
        try:
            stop.start(context.stop_agreement_factory())
            yield stop.has_decision_before_train_step
        finally:
            context.leave(is_over=False)
            # None stands for a handler of C code.
            signal.signal(signum, signal.SIG_DFL if previous_handler is None else previous_handler)
        if stop.was_requested:
            stop.was_requested = False
            signal.raise_signal(signum)

    def _engine(self) -> Collectives:
        return self.collectives

    def _start_failure_monitor(
        self,
        rank: int,
        world_size: int,
        store: Store | None,
        abort: Callable[[Sequence[Peer]], None],
        progress: CollectiveProgress,
    ) -> None:
        self._stage_context = StageContext(self._engine, rank, world_size, store, previous=self._stage_context)
        if store is None:
            return
        self._stage_context.start_failure_monitor(abort, progress, self._hang_timeout_s, get_exit_code, self._fail_with)
        assert self._stage_context.failure_monitor is not None
        self._stage_context.failure_monitor.set_step_source(lambda: "the loop under Fabric")
        if self._check_collectives:
            compare_collectives(self._stage_context, has_batches=False)  # until the process exits

    def _fail_with(self, exception: BaseException) -> BaseException:
        explained = self.explain_exception(exception)
        self.announce_failure(explained)
        return explained


class ExactLoader:
    """DataLoader that returns each sample on one rank only, so that ranks may have different numbers of batches.

    It forwards all other attributes to the DataLoader.

    Args:
        loader: DataLoader with a distributed sampler, which is changed.
        before_iteration: Function that is called when an iteration begins, on all ranks.
    """

    def __init__(self, loader: Any, before_iteration: Callable[[], None]) -> None:
        self.__dict__.update(loader.__dict__)  # as Fabric's own wrapper does
        self.inner = loader
        self._before_iteration = before_iteration
        for owner in (loader, getattr(loader, "batch_sampler", None)):
            sampler = getattr(owner, "sampler", None)
            if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
                repeat_no_samples(sampler)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        self._before_iteration()
        return iter(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.inner, name)

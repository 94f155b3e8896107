"""DDPSpawnElasticStrategy: elastic DDP in workers that ``fit`` starts. Name ``ddp_spawn_elastic_ext``.

When a worker exits, the other workers restore the newest commit and continue. A new worker replaces it and joins the
others before a step. :mod:`lightning_strategies_ext.elastic` implements elastic training. The main process assigns
ranks (:mod:`.launch.processes.elastic_pool`) and serves the store.
"""

import gc
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_strategies_ext import host_store
from lightning_strategies_ext._lightning import launching, user_modules
from lightning_strategies_ext._system.peers import Peer, host_identity
from lightning_strategies_ext.arguments import check_seconds
from lightning_strategies_ext.checks import check_flag, check_int
from lightning_strategies_ext.elastic.arguments import check_commit_interval
from lightning_strategies_ext.elastic.membership import Member, peers_of
from lightning_strategies_ext.exceptions import JoinError
from lightning_strategies_ext.failure.elastic_monitor import elastic_monitor
from lightning_strategies_ext.failure.failure_report import is_collective_error
from lightning_strategies_ext.launch.processes.elastic_pool import RestartPolicy
from lightning_strategies_ext.launch.protocol import RankAssignment
from lightning_strategies_ext.launch.strategy_protocols import WorkerMembership
from lightning_strategies_ext.pytorch.ddp_spawn import DDPSpawnStrategy
from lightning_strategies_ext.pytorch.elastic import ElasticStrategy, is_fitting
from lightning_strategies_ext.renamed import RenamedAttribute
from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.collectives import DefaultGroupProgress
from lightning_strategies_ext.torch_distributed.disconnect import abort, can_abort, disconnect

#: Timeout for connections between ranks, in seconds. Ranks are not notified of a rank that exits while they connect.
CONNECT_S = 10.0


class DDPSpawnElasticStrategy(ElasticStrategy, DDPSpawnStrategy):
    """Data parallelism in workers on one host, with a ``fit`` that continues after the exit of a worker.

    Other stages run as in :class:`.DDPSpawnStrategy`. The workers end after ``fit``.

    Args:
        *args: Arguments of :class:`.DDPSpawnStrategy`.
        elastic: True.
        min_workers: Minimum number of workers; fewer workers wait for restarted ones. 1 if None.
        commit_every_n_steps: Number of optimizer steps between commits, which ranks restore after a failure; 100 if
            None.
        max_restarts: Maximum number of restarts within ``restart_window``, beyond which ``fit`` fails; 3 if None.
        restart_window: Time window of ``max_restarts``, in seconds or as a ``timedelta``.
        scale_learning_rate: Whether to scale learning rates with the number of ranks; a callback takes precedence.
        uneven_inputs: Reaction to different numbers of training batches. "stop" ends the epoch with the first rank that
            runs out, "join" trains on all batches. See :mod:`.uneven.control`.
        **kwargs: Arguments of :class:`.DDPSpawnStrategy`. After ``hang_timeout``, the hung worker is killed and
            replaced.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a value or a combination of values is invalid.

    Example::

        trainer = Trainer(strategy="ddp_spawn_elastic_ext", accelerator="cpu", devices=4)
    """

    strategy_name = "ddp_spawn_elastic_ext"
    restart_policy: RestartPolicy
    allowance = RenamedAttribute("restart_policy")

    def __init__(
        self,
        *args: Any,
        elastic: bool = True,
        min_workers: int | None = None,
        commit_every_n_steps: int | None = None,
        max_restarts: int | None = None,
        restart_window: float | timedelta = 600.0,
        scale_learning_rate: bool = False,
        uneven_inputs: Literal["stop", "join"] = "join",
        **kwargs: Any,
    ) -> None:
        if elastic is not True:
            raise TypeError(f"`elastic={elastic!r}`: {type(self).__name__} is always elastic. Use `DDPSpawnStrategy`.")
        self._commit_every_n_steps = check_commit_interval(commit_every_n_steps)
        self._scale_learning_rate = check_flag("scale_learning_rate", scale_learning_rate)
        self.restart_policy = RestartPolicy(
            check_int("min_workers", 1 if min_workers is None else min_workers, 1),
            check_int("max_restarts", 3 if max_restarts is None else max_restarts, 0),
            check_seconds("restart_window", restart_window),
            leaves_by=(SIGTERMException, JoinError),
        )
        super().__init__(*args, uneven_inputs=uneven_inputs, **kwargs)
        if self._start_method == "fork":
            raise ValueError(
                "`start_method='fork'` cannot be combined with `elastic=True`: workers are restarted during training,"
                " when this process has threads that do not survive a fork. Use 'forkserver' or 'spawn'."
            )
        self._requested_backend = self._process_group_backend
        self._membership: WorkerMembership | None = None
        self._store: dist.Store | None = None  # of all worlds
        self._world_store: dist.Store | None = None

    @property
    @override
    def membership(self) -> WorkerMembership:
        """Membership of this worker, during ``fit``."""
        if self._membership is None:
            raise RuntimeError("`membership` is available only on the ranks of `fit`, while it runs.")
        return self._membership

    @override
    def check_before_launch(self, trainer: "pl.Trainer | None") -> None:
        """Rejects, before processes start, a ``fit`` that would fail.

        Raises:
            ValueError: If there are several hosts, fewer devices than ``min_workers``, or an invalid module.
        """
        if self.num_nodes > 1:
            raise ValueError(
                f"`num_nodes={self.num_nodes}`: `strategy='{self.strategy_name}'` starts workers on one host. Use"
                " `strategy='horovod_elastic_ext'` for several hosts."
            )
        if self.restart_policy.min_workers > self.num_processes:
            raise ValueError(
                f"`min_workers={self.restart_policy.min_workers}`: there are at most {self.num_processes} workers, so"
                " training would never start. Use more workers, or a smaller `min_workers`."
            )
        super().check_before_launch(trainer)

    # --- worlds ---

    @override
    def setup_distributed(self) -> None:
        """Joins the other ranks; during ``fit``, a restarted worker joins them later."""
        context, trainer = self._worker, user_modules.trainer_of(self.lightning_module)
        if context is None or context.channel is None or trainer is None or not is_fitting(trainer):
            super().setup_distributed()
            return
        if not context.is_continuation:
            reset_seed()
        process_group.stop()  # of an earlier stage
        self._membership = WorkerMembership(
            context.channel, context.is_joining, self._join, self._leave_group, _is_peer_loss
        )
        if context.is_joining:
            self._become_joining_rank()
        else:
            rank = self._membership.next_rank(_ignore_wait)
            if rank is None or not self._membership.rendezvous(Member(Peer.this_process(rank)), _ignore_wait):
                raise RuntimeError("A worker exited before training began.")
            self.apply_rank()
        self._enter_context(is_local=context.is_joining)

    @override
    def apply_rank(self) -> None:
        """Sets the rank of this process according to its membership."""
        self._set_rank(self.membership.rank, len(self.membership.members))

    def _become_joining_rank(self) -> None:
        """Sets a provisional rank until this process joins the others: not 0, whose files and output exist already."""
        self._set_rank(max(1, self.local_rank), self.num_processes)

    def _set_rank(self, rank: int, world_size: int) -> None:
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(rank)
        self.cluster_environment.set_world_size(world_size)
        launching.set_rank_zero_only_rank(rank)

    def _join(self, assignment: RankAssignment, members: Sequence[Member]) -> None:
        assert assignment.rank is not None
        # Frees the DDP model and the group of the last world. A DataLoader worker that inherits them by a fork crashes
        # in its garbage collection. They also occupy as much memory as the next world needs.
        gc.collect()
        if self._store is None:
            limit = timedelta(seconds=CONNECT_S)
            if isinstance(assignment.store, str):
                self._store = host_store.connect(assignment.store, limit)
            else:
                self._store = dist.TCPStore(*assignment.store, is_master=False, timeout=limit, wait_for_workers=False)
        self._world_store = dist.PrefixStore(f"world/{assignment.world_number}", self._store)
        num_hosts = len({member.peer.host for member in members})
        backend = self._requested_backend or process_group.default_backend(self.root_device, assignment.size, num_hosts)
        process_group.disable_nccl_watchdog_exit()
        process_group.join(
            backend,
            dist.PrefixStore("group", self._world_store),
            assignment.rank,
            assignment.size,
            self.root_device,
            self._timeout,
            self._process_group_options if assignment.size > 1 else None,
            num_hosts,
        )
        self._process_group_backend = backend
        if assignment.size > 1 and can_abort():
            # NCCL either ignores the exit of a peer or aborts the process; gloo and shm detect exits themselves.
            monitor = elastic_monitor()
            monitor.enter_world(assignment.rank, peers_of(members), abort, tracks_exits=True)

    def _leave_group(self, is_coordinated: bool) -> None:
        elastic_monitor().leave_world(is_coordinated=is_coordinated)
        if not is_coordinated:
            self._disconnect()
        process_group.stop()

    def _disconnect(self) -> None:
        disconnect(self._other_peers)

    @property
    def _other_peers(self) -> list[Peer]:
        own = host_identity(), os.getpid()
        peers = [member.peer for member in self.membership.members]
        return [peer for peer in peers if (peer.host, peer.pid) != own]

    @override
    def _begin_stage(self, trainer: "pl.Trainer") -> None:
        if is_fitting(trainer):
            self._begin_fit(trainer)
        else:
            super()._begin_stage(trainer)

    @override
    def configure_ddp(self) -> None:
        """Wraps the LightningModule in DDP; during ``fit``, only after the state has been restored in a world."""
        if self._membership is None or self._fit is not None:
            super().configure_ddp()

    @override
    def enter_world(self, trainer: "pl.Trainer") -> None:
        """Starts the agreements and the gradient exchange of a world. Collective: all its ranks call it."""
        store = self._world_store if self.world_size > 1 else None
        self._detect_hangs(trainer, store, DefaultGroupProgress())
        self._enter_context(store, "world", is_local=False)
        self.configure_ddp()
        settings = self._logged_values, self.root_device
        self._stage_context.start_uneven_inputs(self._uneven_inputs, trainer, *settings)
        self._begin_evaluations(trainer)
        self._start_stop_agreement(trainer)

    @override
    def leave_world(self, *, is_coordinated: bool) -> None:
        """Leaves the world.

        Args:
            is_coordinated: Whether all ranks leave before the same step; otherwise some may have exited.
        """
        if isinstance(self.model, DistributedDataParallel):
            # A traceback may still refer to this DDP model, whose hooks would exchange the gradients of the next world.
            self.model._remove_autograd_hooks()
            self.model = self.lightning_module
        super().leave_world(is_coordinated=is_coordinated)
        self._features.close()  # after the abort of the groups, because closing a group waits for its operations

    @override
    def detach(self) -> None:
        """Makes the collectives of this rank local, so that it can exit while the other ranks continue."""
        super().detach()
        self.membership.leave(is_coordinated=False)

    @override
    def request_interrupt(self) -> None:
        """Requests that all ranks stop before the same step, as after Ctrl-C; for a worker's signal handler."""
        if self._fit is None:
            super().request_interrupt()
        else:
            self._fit.request_leave(KeyboardInterrupt())

    @override
    def _leave_fit(self) -> None:
        assert self._fit is not None
        self._fit.request_leave(SIGTERMException())  # the exit code of a worker is not used

    @override
    def teardown(self) -> None:
        """Moves the model to the CPU and frees the resources of the strategy. A second call is a no-op."""
        elastic_monitor().leave_world(is_coordinated=True)  # workers exit after the stage
        super().teardown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_membership": None, "_store": None}


def _is_peer_loss(error: BaseException) -> bool:
    """Returns whether an exception comes from a collective, or from waiting for another rank's key in the store."""
    cause: BaseException | None = error
    while cause is not None:
        if is_collective_error(cause) or isinstance(cause, dist.DistError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _ignore_wait(waited_s: float) -> None:
    pass

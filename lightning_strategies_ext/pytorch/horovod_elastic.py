"""HorovodElasticStrategy: ``fit`` over Horovod with ranks that fail, leave, and join. Name ``horovod_elastic_ext``.

:mod:`lightning_strategies_ext.elastic` implements elastic training; this module connects it to Horovod.
"""

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_strategies_ext._lightning import launching
from lightning_strategies_ext.elastic.arguments import check_commit_interval
from lightning_strategies_ext.failure.rank_status import CollectiveProgress
from lightning_strategies_ext.horovod import elastic_driver, environment, runtime
from lightning_strategies_ext.pytorch.elastic import ElasticStrategy, is_fitting
from lightning_strategies_ext.pytorch.horovod import HorovodStrategy
from lightning_strategies_ext.registry import StrategyUnavailableError


class HorovodElasticStrategy(ElasticStrategy, HorovodStrategy):
    """Data parallelism over Horovod with ranks that may fail, leave, and join during ``fit``.

    It requires ``horovodrun`` with a discovery script. ``uneven_inputs`` is "join" by default and may be "stop".

    Args:
        elastic: True.
        commit_every_n_steps: Number of optimizer steps between commits, which ranks restore after a failure; 100 if
            None.
        *args: Arguments of :class:`.HorovodStrategy`.
        **kwargs: Arguments of :class:`.HorovodStrategy`. After ``hang_timeout``, a rank of the same host kills the hung
            rank, and the other ranks continue.

    Raises:
        RuntimeError: If Horovod is not installed, or no elastic driver has started this process.
        TypeError: If an argument has the wrong type.
        ValueError: If a value or a combination of values is invalid.

    Example::

        # horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python train.py
        trainer = Trainer(strategy="horovod_elastic_ext")
    """

    strategy_name = "horovod_elastic_ext"

    def __init__(
        self, *args: Any, elastic: bool = True, commit_every_n_steps: int | None = None, **kwargs: Any
    ) -> None:
        self._commit_every_n_steps = check_commit_interval(commit_every_n_steps)
        kwargs.update(elastic=elastic, commit_every_n_steps=commit_every_n_steps)
        super().__init__(*args, **kwargs)
        if self._uneven_inputs == "error":
            self._uneven_inputs = "join"

    @override
    def _check_elastic(self, elastic: Any, commit_every_n_steps: Any) -> None:
        if elastic is not True:
            raise TypeError(f"`elastic={elastic!r}`: {type(self).__name__} is always elastic. Use `HorovodStrategy`.")
        if self._options.op == "adasum":
            raise ValueError("`elastic=True` uses gloo, but `op='adasum'` requires MPI or NCCL. Omit one of the two.")
        if self._options.process_set is not None:
            raise ValueError(
                f"`elastic=True` cannot be combined with `process_set={self._options.process_set}`: a process set"
                " does not survive a change of ranks. Omit one of the two."
            )
        if not elastic_driver.is_elastic_launch():
            raise StrategyUnavailableError(
                "`elastic=True`: this process was not started for a changing number of ranks. Use `horovodrun -np 2"
                " --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python train.py`, or `elastic=False`."
            )

    @property
    @override
    def membership(self) -> elastic_driver.DriverMembership:
        """Membership of this rank. The first access waits for the other ranks.

        Raises:
            RuntimeError: If not all ranks join in time.
        """
        assert isinstance(self.cluster_environment, environment.HorovodEnvironment)
        return elastic_driver.membership(self.cluster_environment.launch)

    @override
    def _configure_launcher(self) -> None:
        if len(self.parallel_devices or []) != 1:
            raise ValueError(
                f"`devices={len(self.parallel_devices or [])}`: with `elastic=True` the number of ranks on a host may"
                " change. Use `devices=1`; on GPUs, each rank uses the GPU of its local rank."
            )
        super()._configure_launcher()

    @override
    def _join(self) -> None:
        has_joined = self.membership.has_joined
        self.apply_rank()
        assert isinstance(self.cluster_environment, environment.HorovodEnvironment)
        runtime.start(self.cluster_environment.launch, self.root_device)
        self._enter_context(is_local=not has_joined)

    @override
    def _begin_stage(self, trainer: "pl.Trainer") -> None:
        if is_fitting(trainer):
            self._begin_fit(trainer)
        else:
            self.enter_world(trainer)

    # --- one world after another ---

    @override
    def apply_rank(self) -> None:
        """Sets the rank of this process according to its membership."""
        assert isinstance(self.cluster_environment, environment.HorovodEnvironment)
        self.cluster_environment.launch = self.membership.launch
        launching.set_rank_zero_only_rank(self.global_rank)

    @override
    def enter_world(self, trainer: "pl.Trainer") -> None:
        """Starts the agreements and the gradient exchange of a world. Collective: all its ranks call it."""
        is_local = self._stage_context.local_collectives is not None
        # Each world has its own store, because processes of an elastic job start at different times.
        store = None if is_local or self.world_size == 1 else runtime.make_store()
        self._enter_context(store, "world", is_local=is_local)
        self._detect_hangs(trainer, store, CollectiveProgress())
        if store is not None:
            self.membership.detect_host_loss(store)
        self._begin_exchange(trainer)
        # In `fit`, only the ranks that have received a SIGTERM leave.
        must_stop = self._fit is None and self.reduce_boolean_decision(
            self._stage_context.coordinated_stop.was_requested, all=False
        )
        self._begin_evaluations(trainer)
        self._start_stop_agreement(trainer, is_requested=must_stop)

    @override
    def detach(self) -> None:
        """Makes the collectives of this rank local, so that it can exit while the other ranks continue."""
        super().detach()
        elastic_driver.leave()

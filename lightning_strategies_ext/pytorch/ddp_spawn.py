"""DDPSpawnStrategy: DDP in workers that ``fit`` starts, with results returned to the main process.

Names ``ddp_spawn_ext``, ``ddp_fork_ext``, ``ddp_notebook_ext``, and variants. After a stage, the main process has the
same state as if it had run the stage: weights, optimizers, progress, callbacks, metrics, loggers, predictions. Only
the start of processes and the transfer of results differ from :class:`.DDPStrategy` (:mod:`.launch`).
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from typing_extensions import Self, override

from lightning_strategies_ext._lightning import strategy_parts, trainer_data, user_modules
from lightning_strategies_ext.elastic.arguments import check_is_not_elastic
from lightning_strategies_ext.launch.processes.worker_process import WorkerStartMethod
from lightning_strategies_ext.launch.tasks.result_queue import ResultQueue, get_metrics, put_metrics
from lightning_strategies_ext.launch.worker_launcher import WorkerLauncher
from lightning_strategies_ext.pytorch.ddp import DDPStrategy
from lightning_strategies_ext.renamed import RenamedAttribute


class DDPSpawnStrategy(DDPStrategy):
    """Multi-process data parallelism in workers that the Trainer starts, reuses, and ends.

    Args:
        *args: Arguments of :class:`.DDPStrategy`.
        start_method: "forkserver" forks workers from a process that has imported torch and Lightning. That process has
            no threads and no GPU state that a fork would break, because it never imports the user's modules. "spawn"
            starts a new interpreter for each worker. "fork" forks this process, so that workers inherit unpicklable
            objects.
        keep_workers: Whether workers are reused by the next stage. Between stages, a process keeps the workers of at
            most one strategy. Another strategy takes them over if its process group has the same settings and they were
            not forked from this process; otherwise it ends them.
        elastic: Whether ``fit`` continues after the loss of a worker: True creates a :class:`.DDPSpawnElasticStrategy`.
        min_workers: Argument of the elastic strategy.
        commit_every_n_steps: Argument of the elastic strategy.
        max_restarts: Argument of the elastic strategy.
        **kwargs: Further arguments of :class:`.DDPStrategy`. ``uneven_inputs`` is "join" by default with
            ``elastic=True``.

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If a value or a combination of values is invalid.

    Example::

        trainer = Trainer(strategy="ddp_spawn_ext", devices=2)
        trainer.fit(model)
        predictions = trainer.predict(model, loader)  # in the same workers; from all ranks, in order

        with DDPSpawnStrategy() as strategy:  # the end of the block also ends the workers
            Trainer(strategy=strategy, devices=2).fit(model)
    """

    elastic_class = "ddp_spawn_elastic:DDPSpawnElasticStrategy"
    states_of_loaders = RenamedAttribute("loader_states")

    def __init__(
        self,
        *args: Any,
        start_method: WorkerStartMethod = "forkserver",
        keep_workers: bool = True,
        elastic: bool = False,
        min_workers: int | None = None,
        commit_every_n_steps: int | None = None,
        max_restarts: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_is_not_elastic(
            type(self),
            elastic,
            self.elastic_class,
            min_workers=min_workers,
            commit_every_n_steps=commit_every_n_steps,
            max_restarts=max_restarts,
        )
        if start_method not in ("spawn", "fork", "forkserver"):
            raise ValueError(
                f"`start_method={start_method!r}` starts no workers. Use 'forkserver', 'spawn' or 'fork', or"
                " DDPStrategy for scripts that run once per device."
            )
        super().__init__(*args, start_method=start_method, **kwargs)  # type: ignore[misc]  # not among `args`
        self._uses_sync_batchnorm = False
        self.keep_workers = keep_workers
        self.loader_states: list[dict[str, Any]] = []

    @property
    def sync_batchnorm(self) -> bool:
        """Whether BatchNorm layers are converted to SyncBatchNorm for training."""
        return self._uses_sync_batchnorm or isinstance(strategy_parts.layer_sync(self), TorchSyncBatchNorm)

    @sync_batchnorm.setter
    def sync_batchnorm(self, sync_batchnorm: bool) -> None:
        self._uses_sync_batchnorm = sync_batchnorm

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._uses_sync_batchnorm and strategy_parts.layer_sync(self) is None:
            strategy_parts.set_layer_sync(self, TorchSyncBatchNorm())

    @override
    def teardown(self) -> None:
        # The Trainer deletes the loaders' iterators next, and with them the positions of loaders such as torchdata's.
        trainer = user_modules.trainer_of(self.lightning_module)
        if trainer is not None and trainer_data.data_fetcher_of(trainer) is not None:
            self.loader_states = trainer_data.current_loader_states(trainer)
        super().teardown()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Writes a checkpoint; in the main process, it includes the position in the training data, as in a worker.

        Args:
            checkpoint: Checkpoint that ``Trainer.save_checkpoint`` has collected.
            filepath: Path of the checkpoint.
            storage_options: Options of the checkpoint plugin.
        """
        loops = checkpoint.get("loops", {})
        if self.loader_states and "fit_loop" in loops:
            loops["fit_loop"]["state_dict"].setdefault("combined_loader", self.loader_states)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def spawn(self, function: Callable[..., Any], *args: Any, return_result: bool = True, **kwargs: Any) -> Any:
        """Runs a function in workers that form a process group, without a Trainer.

        Each worker calls ``function(*args, **kwargs)``, as in Lightning 1.5. The function gets its rank from
        ``torch.distributed`` or, if it is a method of this strategy, from ``self``. Workers are reused by the next
        call.

        Args:
            function: Function to run. Unless workers are forked, it and its arguments must be picklable.
            *args: Positional arguments of the function.
            return_result: Whether to return the result of the first worker.
            **kwargs: Keyword arguments of the function.

        Returns:
            Result of the function in the first worker, with tensors on the CPU; None without ``return_result``.

        Raises:
            ValueError: If ``parallel_devices`` is unknown.
            WorkerRaisedError: If a worker has raised an exception; an equal exception of all workers is raised
                unchanged.
            WorkerDiedError: If a worker has exited during the call.
        """
        if not self.parallel_devices:
            raise ValueError(
                "`parallel_devices` are not known. Pass them to the strategy, for example"
                " `parallel_devices=[torch.device('cpu')] * 2`, or pass the strategy to a Trainer."
            )
        if self.cluster_environment is None:
            self.cluster_environment = LightningEnvironment()
        if self._launcher is None:
            self._configure_launcher()
        assert isinstance(self._launcher, WorkerLauncher)
        return self._launcher.workers.call(function, args, kwargs, return_result)

    def close(self) -> None:
        """Ends the workers; the next stage starts new workers. They also end with the strategy and the interpreter."""
        if isinstance(self._launcher, WorkerLauncher):
            self._launcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add_to_queue(self, trainer: "pl.Trainer", queue: ResultQueue) -> None:
        """Puts results into the queue, in the first worker at the end of a stage, for :meth:`get_from_queue`.

        By default, it puts ``trainer.callback_metrics`` as NumPy arrays. Override both methods to return more results,
        or define them in the LightningModule, with arguments ``(queue)`` or ``(trainer, queue)``.
        """
        put_metrics(trainer, queue)

    def get_from_queue(self, trainer: "pl.Trainer", queue: ResultQueue) -> None:
        """Gets the results of :meth:`add_to_queue`, in the main process after all other results are applied."""
        get_metrics(trainer, queue)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "loader_states": []}


class DDPSpawnPlugin(DDPSpawnStrategy):
    """:class:`DDPSpawnStrategy` with the arguments of Lightning 1.5's class of this name, in the same order.

    Args:
        parallel_devices: Devices of this host, one per worker.
        num_nodes: Number of hosts; the Trainer overwrites it.
        cluster_environment: Source of ranks and addresses; detected if None.
        checkpoint_io: Plugin that writes and reads checkpoints.
        sync_batchnorm: Whether to convert BatchNorm layers; from ``Trainer(sync_batchnorm=...)`` if None.
        ddp_comm_state: See :class:`.DDPStrategy`.
        ddp_comm_hook: See :class:`.DDPStrategy`.
        ddp_comm_wrapper: See :class:`.DDPStrategy`.
        **kwargs: Further arguments of :class:`DDPSpawnStrategy` and of ``DistributedDataParallel``.
    """

    def __init__(
        self,
        parallel_devices: list[torch.device] | None = None,
        num_nodes: int | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        sync_batchnorm: bool | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            **kwargs,
        )
        if num_nodes is not None:
            self.num_nodes = num_nodes
        if sync_batchnorm is not None:
            self.sync_batchnorm = sync_batchnorm

    @override
    def setup(self, trainer: "pl.Trainer | None" = None) -> None:
        """Prepares a stage in a worker, as :meth:`.DDPStrategy.setup`; a no-op without a Trainer.

        Args:
            trainer: Trainer of the stage; in a worker, the Trainer of the current stage by default.
        """
        if trainer is None and self._worker is not None and self.lightning_module is not None:
            trainer = user_modules.trainer_of(self.lightning_module)
        if trainer is not None:
            super().setup(trainer)

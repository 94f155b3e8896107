"""DDPRayStrategy: DDP in workers on a Ray cluster, with results returned to the main process. Name ``ddp_ray_ext``.

Unlike in :class:`.DDPSpawnStrategy`, Ray places the workers (:mod:`.launch.ray`), and their ranks depend on the
placement: the workers on one host are its local ranks.
"""

import os
import socket
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_strategies_ext.arguments import DEFAULT_HANG_TIMEOUT, DEFAULT_TIMEOUT
from lightning_strategies_ext.elastic.arguments import check_is_not_elastic
from lightning_strategies_ext.launch.processes.process_settings import check_environment_variables
from lightning_strategies_ext.launch.processes.worker_interface import WorkerStarter
from lightning_strategies_ext.launch.ray.cluster import (
    PlacementStrategy,
    ResourceDemand,
    check_address,
    check_ray_installed,
    check_resource_arguments,
)
from lightning_strategies_ext.launch.strategy_protocols import WorkerContext
from lightning_strategies_ext.pytorch.ddp_spawn import DDPSpawnStrategy
from lightning_strategies_ext.torch_distributed.compression.config import Compression, CompressionName
from lightning_strategies_ext.uneven.control import UnevenInputs

#: Arguments of :class:`.DDPSpawnStrategy` that this class rejects → default and reason. LightningCLI passes the
#: defaults of the base class's arguments, too.
_REFUSED = {
    "start_method": ("forkserver", "Ray starts the workers"),
    "cluster_environment": (None, "ranks and addresses come from where Ray has put the workers"),
}


class DDPRayStrategy(DDPSpawnStrategy):
    """Multi-process data parallelism in workers on a Ray cluster, or on this host if there is no cluster.

    Args:
        num_workers: Number of workers; from ``Trainer(devices=...)`` if None.
        num_cpus_per_worker: Number of CPUs that Ray reserves per worker, and of its threads for computation; with a
            fraction, workers share a CPU.
        num_gpus_per_worker: Number of GPUs that Ray reserves per worker, at most 1; if None, 1 for a Trainer on GPUs
            and 0 otherwise.
        resources_per_worker: Further resources that each worker requires: name in the cluster → amount.
        placement: "PACK" places workers on as few hosts as possible, "SPREAD" on as many as possible.
        address: Address of the cluster: "auto" for the cluster of this host, ``"host:port"`` for another cluster,
            "local" for Ray on this host, which ends with the workers, or ``"ray://host:port"`` for a cluster that does
            not include this host (Ray Client). If None: the cluster to which this process is connected (``ray.init``),
            else the value of ``RAY_ADDRESS``, else "local".
        runtime_env: Runtime environment of the workers, as for ``ray.init``; ``{"working_dir": "."}`` copies your
            modules. If this process is already connected, pass it to ``ray.init`` instead.
        environment_variables: Names and patterns of the main process's environment variables that workers receive:
            ``["WANDB_*", "HF_TOKEN"]`` for only these, ``["!AWS_*"]`` for all except these; all if None. Variables of
            Ray or of a host, such as ``RAY_AUTH_TOKEN``, ``PATH``, or ``HOME``, are always excluded.
        accelerator: See :class:`.DDPSpawnStrategy`.
        parallel_devices: See :class:`.DDPSpawnStrategy`; only their type and number are used.
        checkpoint_io: See :class:`.DDPSpawnStrategy`.
        precision_plugin: See :class:`.DDPSpawnStrategy`.
        ddp_comm_state: See :class:`.DDPStrategy`.
        ddp_comm_hook: See :class:`.DDPStrategy`.
        ddp_comm_wrapper: See :class:`.DDPStrategy`.
        model_averaging_period: See :class:`.DDPStrategy`.
        process_group_backend: See :class:`.DDPStrategy`.
        timeout: See :class:`.DDPStrategy`; also the timeout for resources that other jobs of the cluster use.
        process_group_options: See :class:`.DDPStrategy`.
        keep_workers: See :class:`.DDPSpawnStrategy`.
        hang_timeout: See :class:`.DDPStrategy`.
        uneven_inputs: See :class:`.DDPStrategy`.
        compression: See :class:`.DDPStrategy`.
        elastic: Whether ``fit`` continues after the loss of a worker or its host: True creates a
            :class:`.DDPRayElasticStrategy`.
        min_workers: Argument of :class:`.DDPRayElasticStrategy`.
        commit_every_n_steps: Argument of :class:`.DDPRayElasticStrategy`.
        max_restarts: Argument of :class:`.DDPRayElasticStrategy`.
        **kwargs: Arguments of ``torch.nn.parallel.DistributedDataParallel``.

    Raises:
        StrategyUnavailableError: If Ray is not installed.
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If a value or a combination of values is invalid.

    Example::

        from lightning_strategies_ext import DDPRayStrategy

        trainer = Trainer(strategy=DDPRayStrategy(num_workers=8, address="auto"))
        trainer.fit(model, datamodule)
        predictions = trainer.predict(model, datamodule)  # in the same workers; from all ranks, in order
    """

    elastic_class = "ddp_ray_elastic:DDPRayElasticStrategy"
    _may_change = False  # whether workers may change during `fit`

    def __init__(
        self,
        num_workers: int | None = None,
        num_cpus_per_worker: float = 1,
        num_gpus_per_worker: float | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        placement: PlacementStrategy = "PACK",
        address: str | None = None,
        runtime_env: dict[str, Any] | None = None,
        environment_variables: Sequence[str] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        process_group_options: Any | None = None,
        keep_workers: bool = True,
        hang_timeout: float | timedelta | None = DEFAULT_HANG_TIMEOUT,
        uneven_inputs: UnevenInputs = "error",
        compression: CompressionName | Compression | None = None,
        elastic: bool = False,
        min_workers: int | None = None,
        commit_every_n_steps: int | None = None,
        max_restarts: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_is_not_elastic(
            type(self),
            elastic,
            "DDPRayStrategy",
            min_workers=min_workers,
            commit_every_n_steps=commit_every_n_steps,
            max_restarts=max_restarts,
        )
        for name, (default, why) in _REFUSED.items():
            value = kwargs.pop(name, default)
            if value != default:
                raise ValueError(f"`{name}={value!r}` cannot be had with `ddp_ray_ext`: {why}. Leave it out.")
        check_resource_arguments(num_workers, num_cpus_per_worker, num_gpus_per_worker, resources_per_worker, placement)
        if num_gpus_per_worker is not None and num_gpus_per_worker > 1:
            raise ValueError(
                f"`num_gpus_per_worker={num_gpus_per_worker!r}`: a worker computes on one GPU. Use as many"
                " `num_workers` as GPUs."
            )
        check_address(address)
        if runtime_env is not None and not isinstance(runtime_env, dict):
            raise TypeError(f"`runtime_env` must be a dict, as `ray.init` takes it, or None, got {runtime_env!r}.")
        check_environment_variables(environment_variables)
        check_ray_installed()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=timeout,
            process_group_options=process_group_options,
            keep_workers=keep_workers,
            hang_timeout=hang_timeout,
            uneven_inputs=uneven_inputs,
            compression=compression,
            **kwargs,
        )
        self._num_workers = num_workers
        self._num_cpus = num_cpus_per_worker
        self._num_gpus = num_gpus_per_worker
        self._resources = dict(resources_per_worker or {})
        self._placement: PlacementStrategy = placement
        self._address = address
        self._runtime_env = runtime_env
        self._environment_variables = environment_variables
        self._signs: list[str] = []

    # --- environment, launch ---

    @override
    def _configure_launcher(self) -> None:
        if self.num_nodes > 1:
            raise ValueError(
                f"`num_nodes={self.num_nodes}`: Ray decides on which hosts workers are. Leave it out and give"
                " `num_workers` to the strategy, with `placement='SPREAD'` for as many hosts as possible."
            )
        devices = self.parallel_devices or [torch.device("cpu")]
        if self._num_workers is not None:
            if devices[0].type == "cpu" and len(devices) not in (1, self._num_workers):
                raise ValueError(
                    f"`num_workers={self._num_workers}` and `devices={len(devices)}` differ. Give one of them only."
                )
            self.parallel_devices = [devices[0]] * self._num_workers
        super()._configure_launcher()

    @override
    def _make_starter(self) -> WorkerStarter:
        from lightning_strategies_ext.launch.ray.starter import RayStarter

        modules = (pl.__name__, __name__)
        variables = self._environment_variables
        return RayStarter(
            self._demand(), self._address, self._runtime_env, variables, self._wait_s, modules, self._may_change
        )

    @property
    def _wait_s(self) -> float:
        """Timeout for resources of the cluster, in seconds."""
        return (self._timeout or default_pg_timeout).total_seconds()

    def _demand(self) -> ResourceDemand:
        is_on_gpus = self.parallel_devices is not None and self.parallel_devices[0].type == "cuda"
        num_gpus = float(is_on_gpus) if self._num_gpus is None else self._num_gpus
        if num_gpus and not is_on_gpus:
            raise ValueError(
                f"`num_gpus_per_worker={num_gpus:g}`, and the Trainer computes on CPUs: use"
                " `Trainer(accelerator='gpu')`, in a main process that has a GPU, too."
            )
        if is_on_gpus and not num_gpus:
            raise ValueError(
                "`num_gpus_per_worker=0`, and the Trainer computes on GPUs: leave it out, or use"
                " `Trainer(accelerator='cpu')`."
            )
        return ResourceDemand(self._num_cpus, num_gpus, self._resources, self._placement)

    @contextmanager
    @override
    def wrap_stage(self, trainer: "pl.Trainer") -> Generator[None, None, None]:
        """Creates an empty file in each output directory of the stage, so that workers can check for shared storage."""
        with ExitStack() as files:
            self._signs = []
            for directory in _written_to(trainer):
                with suppress(OSError):  # the worker raises the error when it writes there
                    os.makedirs(directory, exist_ok=True)
                    file = files.enter_context(tempfile.NamedTemporaryFile(prefix=".ddp_ray_ext-", dir=directory))
                    self._signs.append(file.name)
            yield

    # --- in a worker ---

    @override
    def enter_worker(self, context: WorkerContext) -> None:
        """Sets the ranks and the device that Ray has assigned to this worker; called before all other methods.

        Raises:
            RuntimeError: If this worker is or may become rank 0, and does not share the main process's output
                directories.
        """
        super().enter_worker(context)
        rank_info = context.rank_info
        assert rank_info is not None
        if rank_info.rank == 0 or self._may_change:
            _check_are_seen(self._signs, rank_info.rank)
        assert self.parallel_devices is not None
        kind = self.parallel_devices[0].type
        # A worker sees only the GPUs that Ray has assigned to it.
        self._set_rank_info(rank_info, torch.device(kind) if kind == "cpu" else torch.device(kind, 0))


def _written_to(trainer: "pl.Trainer") -> list[str]:
    """Returns the directories of a stage's checkpoints and loggers, except those at URLs."""
    found: list[Any] = [trainer.default_root_dir] if trainer.loggers or trainer.checkpoint_callbacks else []
    found += [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    found += [logger.save_dir for logger in trainer.loggers]
    return [path for path in dict.fromkeys(str(path) for path in found if path) if "://" not in path]


def _check_are_seen(signs: list[str], rank: int) -> None:
    for sign in signs:
        if not os.path.exists(sign):
            cure = "let the main process's host have CPUs in the cluster, where rank 0 is put then"
            if rank:
                cure = "leave `elastic` out, by which any rank may have to write them when others are lost"
            raise RuntimeError(
                f"{os.path.dirname(sign)} of the main process is not that of {socket.gethostname()}, where rank {rank}"
                " is: checkpoints and logs would not be found. Give the Trainer a `default_root_dir` (and callbacks and"
                " loggers a directory) on a storage that all hosts see, a shared disk or an address such as 's3://…';"
                f" or {cure}."
            )

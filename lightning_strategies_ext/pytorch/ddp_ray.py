"""DDPRayStrategy: DDP in workers on a Ray cluster, with results returned to the main process. Name ``ddp_ray_ext``.

Unlike in :class:`.DDPSpawnStrategy`, Ray places the workers (:mod:`.launch.ray`), and their ranks depend on the
placement: the workers on one host are its local ranks.
"""

import math
import os
import socket
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_strategies_ext.launch.processes.process_settings import check_environment_variables
from lightning_strategies_ext.launch.processes.worker_interface import WorkerStarter
from lightning_strategies_ext.launch.ray.cluster import (
    PlacementStrategy,
    ResourceDemand,
    check_address,
    check_ray_installed,
)
from lightning_strategies_ext.launch.strategy_protocols import WorkerContext
from lightning_strategies_ext.pytorch.ddp_spawn import DDPSpawnStrategy
from lightning_strategies_ext.pytorch.rank_assignment import use_rank_info

#: Arguments of :class:`.DDPSpawnStrategy` that this class rejects → default and reason. LightningCLI passes the
#: defaults of the base class's arguments, too.
_REFUSED = {
    "start_method": ("forkserver", "Ray starts the workers"),
    "cluster_environment": (None, "Ray determines ranks and addresses"),
}


class DDPRayStrategy(DDPSpawnStrategy):
    """Multi-process data parallelism in workers on a Ray cluster, or on this host if there is no cluster.

    Args:
        num_workers: Number of workers; from ``Trainer(devices=...)`` if None.
        num_cpus_per_worker: Number of CPUs that Ray reserves per worker, and of the worker's computation threads. With
            a fraction, workers share a CPU.
        num_gpus_per_worker: Number of GPUs that Ray reserves per worker, at most 1; if None, 1 for a Trainer on GPUs
            and 0 otherwise.
        resources_per_worker: Further resources that each worker requires: name in the cluster → amount.
        placement_strategy: "PACK" places workers on as few hosts as possible, "SPREAD" on as many as possible.
        address: Address of the cluster. "auto" is the cluster of this host, ``"host:port"`` another cluster, and
            ``"ray://host:port"`` a cluster that does not include this host (Ray Client). "local" starts Ray on this
            host, until the workers end. If None: the cluster to which this process is connected (``ray.init``), else
            the value of ``RAY_ADDRESS``, else "local".
        runtime_env: Runtime environment of the workers, as for ``ray.init``; ``{"working_dir": "."}`` copies your
            modules. If this process is already connected, pass it to ``ray.init`` instead.
        environment_variables: Names and patterns of the main process's environment variables that workers receive:
            ``["WANDB_*", "HF_TOKEN"]`` for only these, ``["!AWS_*"]`` for all except these; all if None. Variables of
            Ray or of a host, such as ``RAY_AUTH_TOKEN``, ``PATH``, or ``HOME``, are always excluded.
        **kwargs: Arguments of :class:`.DDPSpawnStrategy` except ``start_method`` and ``cluster_environment``. Only the
            type and the number of ``parallel_devices`` are used. ``timeout`` is also the timeout for resources that
            other jobs of the cluster use. ``elastic=True`` creates a :class:`.DDPRayElasticStrategy`.

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

    def __init__(
        self,
        num_workers: int | None = None,
        num_cpus_per_worker: float = 1,
        num_gpus_per_worker: float | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        placement_strategy: PlacementStrategy = "PACK",
        address: str | None = None,
        runtime_env: dict[str, Any] | None = None,
        environment_variables: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        for name, (default, reason) in _REFUSED.items():
            value = kwargs.pop(name, default)
            if value != default:
                raise ValueError(
                    f"`{name}={value!r}` cannot be combined with `ddp_ray_ext`: {reason}. Omit the argument."
                )
        _check_resource_arguments(
            num_workers, num_cpus_per_worker, num_gpus_per_worker, resources_per_worker, placement_strategy
        )
        if num_gpus_per_worker is not None and num_gpus_per_worker > 1:
            raise ValueError(
                f"`num_gpus_per_worker={num_gpus_per_worker!r}`: a worker computes on one GPU. Use one worker per GPU"
                " (`num_workers`)."
            )
        check_address(address)
        if runtime_env is not None and not isinstance(runtime_env, dict):
            raise TypeError(f"`runtime_env` must be a dict, as for `ray.init`, or None, got {runtime_env!r}.")
        check_environment_variables(environment_variables)
        check_ray_installed()
        super().__init__(**kwargs)
        self._num_workers = num_workers
        self._num_cpus = num_cpus_per_worker
        self._num_gpus = num_gpus_per_worker
        self._resources = dict(resources_per_worker or {})
        self._placement_strategy: PlacementStrategy = placement_strategy
        self._address = address
        self._runtime_env = runtime_env
        self._environment_variables = environment_variables
        self._probe_files: list[str] = []

    # --- environment, launch ---

    @override
    def _configure_launcher(self) -> None:
        if self.num_nodes > 1:
            raise ValueError(
                f"`num_nodes={self.num_nodes}`: Ray decides on which hosts workers run. Omit the argument and pass"
                " `num_workers` to the strategy, with `placement_strategy='SPREAD'` for as many hosts as possible."
            )
        devices = self.parallel_devices or [torch.device("cpu")]
        if self._num_workers is not None:
            if devices[0].type == "cpu" and len(devices) not in (1, self._num_workers):
                raise ValueError(
                    f"`num_workers={self._num_workers}` and `devices={len(devices)}` differ. Pass only one of them."
                )
            self.parallel_devices = [devices[0]] * self._num_workers
        super()._configure_launcher()

    @override
    def _make_starter(self) -> WorkerStarter:
        from lightning_strategies_ext.launch.ray.starter import RayStarter

        modules = (pl.__name__, __name__)
        variables = self._environment_variables
        return RayStarter(
            self._resource_demand(),
            self._address,
            self._runtime_env,
            variables,
            self._placement_timeout_s,
            modules,
            self._is_elastic,
        )

    @property
    def _placement_timeout_s(self) -> float:
        """Timeout for resources of the cluster, in seconds."""
        return (self._timeout or default_pg_timeout).total_seconds()

    def _resource_demand(self) -> ResourceDemand:
        is_on_gpus = self.parallel_devices is not None and self.parallel_devices[0].type == "cuda"
        num_gpus = float(is_on_gpus) if self._num_gpus is None else self._num_gpus
        if num_gpus and not is_on_gpus:
            raise ValueError(
                f"`num_gpus_per_worker={num_gpus:g}`, but the Trainer computes on CPUs. Use"
                " `Trainer(accelerator='gpu')`, in a main process that also has a GPU."
            )
        if is_on_gpus and not num_gpus:
            raise ValueError(
                "`num_gpus_per_worker=0`, but the Trainer computes on GPUs. Omit the argument, or use"
                " `Trainer(accelerator='cpu')`."
            )
        return ResourceDemand(self._num_cpus, num_gpus, self._resources, self._placement_strategy)

    @contextmanager
    @override
    def wrap_stage(self, trainer: "pl.Trainer") -> Generator[None, None, None]:
        """Creates an empty file in each output directory of the stage, so that workers can check for shared storage."""
        with ExitStack() as files:
            self._probe_files = []
            for directory in _output_directories(trainer):
                with suppress(OSError):  # the worker raises the error when it writes there
                    os.makedirs(directory, exist_ok=True)
                    file = files.enter_context(tempfile.NamedTemporaryFile(prefix=".ddp_ray_ext-", dir=directory))
                    self._probe_files.append(file.name)
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
        if rank_info.rank == 0 or self._is_elastic:
            _check_shared_storage(self._probe_files, rank_info.rank)
        assert self.parallel_devices is not None
        kind = self.parallel_devices[0].type
        # A worker sees only the GPUs that Ray has assigned to it.
        use_rank_info(self, rank_info, torch.device(kind) if kind == "cpu" else torch.device(kind, 0))


def _check_resource_arguments(
    num_workers: Any, num_cpus: Any, num_gpus: Any, resources: Any, placement_strategy: Any
) -> None:
    """Checks the strategy's arguments about workers, without a cluster.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a value is invalid.
    """
    if num_workers is not None and (not isinstance(num_workers, int) or isinstance(num_workers, bool)):
        raise TypeError(f"`num_workers` must be an int or None, got {num_workers!r}.")
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"`num_workers={num_workers!r}` must be at least 1.")
    resources = {} if resources is None else resources
    if not isinstance(resources, Mapping):
        raise TypeError(f"`resources_per_worker` must be a dict such as {{'fast': 1}}, got {resources!r}.")
    for name in ("CPU", "GPU"):
        if name in resources:
            raise ValueError(f"`resources_per_worker` contains {name!r}. Use `num_{name.lower()}s_per_worker` instead.")
    amounts = {"num_cpus_per_worker": num_cpus, "num_gpus_per_worker": 0 if num_gpus is None else num_gpus}
    amounts.update({f"resources_per_worker[{name!r}]": amount for name, amount in resources.items()})
    for name, amount in amounts.items():
        if not isinstance(amount, (int, float)) or isinstance(amount, bool):
            raise TypeError(f"`{name}` must be a number, got {amount!r}.")
        if not 0 <= amount < math.inf:
            raise ValueError(f"`{name}={amount!r}` must be finite and not negative.")
        if amount > 1 and amount != int(amount):
            raise ValueError(f"`{name}={amount!r}`: Ray supports fractions only below 1. Use a whole number.")
    if not num_cpus:
        raise ValueError(
            "`num_cpus_per_worker=0`: a worker requires CPU time. Use a fraction if several workers share a CPU."
        )
    if placement_strategy not in get_args(PlacementStrategy):
        raise ValueError(
            f"`placement_strategy={placement_strategy!r}` must be 'PACK' (few hosts) or 'SPREAD' (many hosts)."
        )


def _output_directories(trainer: "pl.Trainer") -> list[str]:
    """Returns the directories of a stage's checkpoints and loggers, except those at URLs."""
    found: list[Any] = [trainer.default_root_dir] if trainer.loggers or trainer.checkpoint_callbacks else []
    found += [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    found += [logger.save_dir for logger in trainer.loggers]
    return [path for path in dict.fromkeys(str(path) for path in found if path) if "://" not in path]


def _check_shared_storage(probe_files: list[str], rank: int) -> None:
    for file in probe_files:
        if not os.path.exists(file):
            remedy = "add CPUs of the main process's host to the cluster, so that rank 0 runs there"
            if rank:
                remedy = "omit `elastic`, with which any rank may have to write files after others are lost"
            raise RuntimeError(
                f"Rank {rank} on {socket.gethostname()} does not see the main process's directory"
                f" {os.path.dirname(file)}, so checkpoints and logs would be lost. Set `default_root_dir` (and the"
                f" directories of callbacks and loggers) to shared storage, such as NFS or 's3://…', or {remedy}."
            )

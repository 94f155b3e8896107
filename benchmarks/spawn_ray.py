"""Contenders of :mod:`benchmarks.spawn` on Ray, and the cluster that they share.

Ray Train has its fastest settings: the model is created in the worker, only rank 0 reports a checkpoint, which contains
only the weights, and it is written once, to the path from which the main process reads it
(``CheckpointUploadMode.NO_UPLOAD``).
"""

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import spawn_cases
from benchmarks.spawn_cases import NUM_WORKERS, Clock, Model

RAY_TRAIN = "TorchTrainer"
OURS_ON_RAY = "ddp_ray_ext"
NAMES = RAY_TRAIN, OURS_ON_RAY
WEIGHTS = "weights.pt"


def is_available() -> bool:
    """Returns whether Ray and the requirements of Ray Train are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("ray", "pyarrow"))


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Starts a Ray cluster on this machine, with a CPU for each worker.

    Yields:
        Environment variables with which interpreters connect to the cluster.
    """
    import ray

    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")}
    # Workers inherit the first variable. With the second, Ray listens at 127.0.0.1 only.
    os.environ.update(PYTHONPATH=str(Path(__file__).parents[1]), RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        try:
            context = ray.init(
                address="local",
                num_cpus=NUM_WORKERS,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=directory,
            )
            yield {"RAY_ADDRESS": context.address_info["address"]}
        finally:
            ray.shutdown()
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def connect() -> None:
    """Connects this interpreter to the cluster, before the clock starts."""
    import ray

    ray.init(log_to_driver=False, logging_level=logging.ERROR)


class ContenderOnRay:
    """Returns a contender, see :class:`.Contender`.

    Args:
        name: One of :data:`NAMES`.
        directory: Empty directory for the clock and the files of Ray Train.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.clock = Clock(directory)
        self.trainer: Any = (
            RayTrainStages(self.clock, directory)
            if name == RAY_TRAIN
            else spawn_cases.make_trainer(NUM_WORKERS, name, [self.clock])
        )


class RayTrainStages:
    """The stages of a Trainer, each with a ``TorchTrainer``.

    Args:
        clock: Clock of the contender.
        directory: Directory for checkpoints and files of Ray Train.
    """

    def __init__(self, clock: Clock, directory: Path) -> None:
        self.clock = clock
        self.directory = directory / "storage"

    def fit(self, model: Model, loader: Any) -> None:
        """Trains a model in workers, and loads the checkpoint that they return."""
        result = self._run({"stage": "fit", "loader": loader, "frozen_mb": model.frozen_mb})
        with result.checkpoint.as_directory() as directory:
            model.load_state_dict(torch.load(Path(directory, WEIGHTS), mmap=True))

    def validate(self, model: Model, loader: Any) -> None:
        """Validates the model in workers."""
        self._run({"stage": "validate", "loader": loader, "model": model})

    def test(self, model: Model, loader: Any) -> None:
        """Tests the model in workers."""
        self._run({"stage": "test", "loader": loader, "model": model})

    def _run(self, config: dict[str, Any]) -> Any:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        return TorchTrainer(
            run_stage,
            train_loop_config={
                **config,
                "clock": self.clock,
                "directory": self.directory / config["stage"] / "weights",
            },
            scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
            run_config=RunConfig(name=config["stage"], storage_path=str(self.directory)),
        ).fit()


def run_stage(config: dict[str, Any]) -> None:
    """Trains in a worker of Ray Train, as in Ray's documentation for Lightning."""
    import ray.train
    from ray.train import Checkpoint, CheckpointUploadMode
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

    trainer = spawn_cases.make_trainer("auto", RayDDPStrategy(), [config["clock"]], plugins=[RayLightningEnvironment()])
    trainer = prepare_trainer(trainer)
    if config["stage"] != "fit":
        getattr(trainer, config["stage"])(config["model"], config["loader"])
        return
    model = Model(config["frozen_mb"])
    trainer.fit(model, config["loader"])
    checkpoint = None
    if trainer.is_global_zero:
        config["directory"].mkdir(parents=True)
        torch.save(model.state_dict(), config["directory"] / WEIGHTS)
        checkpoint = Checkpoint.from_directory(config["directory"])
    ray.train.report({}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

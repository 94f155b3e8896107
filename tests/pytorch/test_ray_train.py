"""``ddp_ext`` in a ``TorchTrainer`` of Ray Train: Ray provides the ranks, devices, and process group."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_strategies_ext import DDPSpawnStrategy, DDPStrategy, ShmOptions
from lightning_strategies_ext.pytorch import rank_assignment
from tests.support.ddp_spawn_trainers import seeded
from tests.support.models import MLP, assert_same_bits, loader, make_trainer, state_of
from tests.support.ray_clusters import FOREVER_S, needs_ray, needs_ray_train, own_ray_for_train

pytestmark = [pytest.mark.processes, needs_ray, needs_ray_train, pytest.mark.timeout(FOREVER_S)]


def refused() -> list[str]:
    """Returns the errors of Trainers whose arguments contradict the decisions of Ray Train."""
    messages = []
    for strategy, devices in (
        (DDPSpawnStrategy(), 2),
        (DDPStrategy(process_group_backend="gloo"), 1),
        (DDPStrategy(process_group_options=ShmOptions()), 1),
        (DDPStrategy(timeout=timedelta(seconds=5)), 1),
        (DDPStrategy(), 3),
    ):
        try:
            make_trainer(strategy, devices=devices)
        except ValueError as error:
            messages.append(str(error).partition(" ")[0])
    return messages


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with own_ray_for_train():
        yield


class Fails(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 2:
            raise ValueError("bad sample")


def fit_and_more(config: dict[str, Any]) -> None:
    """Trains on each worker; the last ``fit`` fails."""
    from ray.train.lightning import RayTrainReportCallback

    torch.set_num_threads(1)
    backend = torch.distributed.get_backend()
    model = seeded()
    trainer = make_trainer("ddp_ext", devices="auto", max_epochs=2, callbacks=[RayTrainReportCallback()])
    trainer.fit(model, loader(shuffle=True))
    weights = state_of(model)
    (metrics,) = trainer.validate(model, loader(), verbose=False)
    strategy = trainer.strategy
    seen = [strategy.global_rank, strategy.local_rank, strategy.node_rank, strategy.world_size, strategy.num_nodes]
    environment = {
        "seen": [*seen, trainer.is_global_zero, trainer.global_step, trainer.world_size],
        "backend": [strategy.process_group_backend, backend],
        "validated": metrics,
        "refused": refused(),
    }
    directory = Path(config["directory"])
    (directory / f"rank{strategy.global_rank}.json").write_text(json.dumps(environment))
    torch.save(weights, directory / f"rank{strategy.global_rank}.pt")
    make_trainer("ddp_ext", devices="auto", callbacks=[Fails()]).fit(MLP(), loader())


def test_fit_trains_as_in_spawned_workers_and_an_error_reaches_the_torch_trainer(tmp_path):
    from ray.train import RunConfig, ScalingConfig, WorkerGroupError
    from ray.train.torch import TorchConfig, TorchTrainer

    torch_trainer = TorchTrainer(
        fit_and_more,
        train_loop_config={"directory": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(name="run", storage_path=str(tmp_path / "storage")),
        torch_config=TorchConfig(backend="shm"),
    )
    with pytest.raises(WorkerGroupError) as raised:
        torch_trainer.fit()
    assert "ValueError: bad sample" in str(raised.value)
    expected = seeded()
    own = make_trainer("ddp_spawn_ext", max_epochs=2)
    own.fit(expected, loader(shuffle=True))
    (metrics,) = own.validate(expected, loader(), verbose=False)
    for rank in (0, 1):
        environment = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert environment["seen"] == [rank, rank, 0, 2, 1, rank == 0, own.global_step, 2]
        assert environment["backend"] == ["shm", "shm"]
        assert [message.partition("=")[0] for message in environment["refused"]] == [
            "`DDPSpawnStrategy`",
            *("`process_group_backend", "`process_group_options", "`timeout", "`devices"),
        ]
        assert environment["validated"] == metrics
        assert_same_bits(torch.load(tmp_path / f"rank{rank}.pt"), state_of(expected))
    *_, last = sorted((tmp_path / "storage").rglob("checkpoint.ckpt"))
    assert_same_bits(torch.load(last, weights_only=False)["state_dict"], state_of(expected))


def test_the_main_process_is_none_of_its_workers():
    import ray.train  # noqa: F401

    assert rank_assignment.ray_train_rank_info() is None
    trainer = make_trainer("ddp_spawn_ext", max_epochs=1)
    trainer.fit(MLP(), loader())
    assert trainer.global_step == 8

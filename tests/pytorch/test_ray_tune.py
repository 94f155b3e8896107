"""``ddp_ext`` in trials of Ray Tune, each of which is a ``TorchTrainer`` of Ray Train.

The tests are part of ``make slow``, not of ``make test``. They take more than two minutes of a core, mostly in the
seven processes that Ray starts for each trial, and in the two processes of its ranks.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DistributedSampler

from tests.support.ddp_spawn_trainers import seeded
from tests.support.models import MLP, dataset, loader, make_trainer
from tests.support.ray_clusters import FOREVER_S, needs_ray, needs_ray_train, own_ray_for_train

pytestmark = [needs_ray, needs_ray_train, pytest.mark.slow, pytest.mark.timeout(FOREVER_S)]

NUM_EPOCHS = 3
#: So small a share of a CPU that finished trials may keep it, see docs/ddp_ray.md, "Trials of Ray Tune".
SHARE = {"CPU": 0.1}


def run_trial(config: dict[str, Any]) -> None:
    """Runs a trial with the learning rate ``lr`` and its files in ``directory``."""
    from ray import tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    TorchTrainer(
        fit,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker=SHARE),
        torch_config=TorchConfig(backend="shm"),
        run_config=RunConfig(
            name=tune.get_context().get_trial_id(), storage_path=config["directory"], callbacks=[TuneReportCallback()]
        ),
    ).fit()


def fit(config: dict[str, Any]) -> None:
    """Trains on each rank, and reports after each epoch."""
    import ray.train

    class Learner(MLP):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=config["lr"])

    class Reports(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            loss = trainer.callback_metrics["loss"].item()
            ray.train.report({"loss": loss, "has_learnt": float(loss < 1.08), "num_ranks": trainer.world_size})

    torch.set_num_threads(1)
    make_trainer("ddp_ext", devices="auto", max_epochs=NUM_EPOCHS, callbacks=[Reports()]).fit(seeded(Learner), loader())


@pytest.fixture(autouse=True)
def cluster() -> Iterator[None]:
    with own_ray_for_train():
        yield


def losses_of_one_process(lr: float) -> list[float]:
    """Returns the values of each epoch in one process with the batches of two ranks."""
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    sampler = DistributedSampler(dataset(), num_replicas=1, rank=0, seed=11)
    losses = []
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        total = 0.0
        for batch in loader(batch_size=8, sampler=sampler):
            loss = model.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() / 8
        losses.append(total)
    return losses


@pytest.mark.processes
def test_of_four_trials_with_two_ranks_each_asha_stops_two(tmp_path):
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    rates = [0.3, 1.0, 0.0, 0.001]
    results = tune.Tuner(
        tune.with_resources(run_trial, SHARE),
        param_space={"lr": tune.grid_search(rates), "directory": str(tmp_path / "storage")},
        tune_config=tune.TuneConfig(
            metric="has_learnt",
            mode="max",
            # Trials that do not learn start after a trial that learns has ended, which determines the stopped trial.
            max_concurrent_trials=2,
            scheduler=ASHAScheduler(max_t=NUM_EPOCHS, grace_period=1, reduction_factor=2),
        ),
        run_config=tune.RunConfig(name="trials", storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert not results.errors
    assert [result.config["lr"] for result in results] == rates
    for result, num_epochs in zip(results, [NUM_EPOCHS, NUM_EPOCHS, 1, 1], strict=True):
        reported = result.metrics_dataframe
        assert reported["loss"].tolist() == pytest.approx(losses_of_one_process(result.config["lr"])[:num_epochs])
        assert set(reported["num_ranks"]) == {2}

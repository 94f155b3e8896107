"""What a trial of Ray Tune runs in the tests: a ``TorchTrainer`` with two ranks. Only these import Lightning."""

from typing import Any

NUM_EPOCHS = 3
#: So little of a CPU that trials which have ended may keep theirs, see docs/ddp_ray.md, "Trials of Ray Tune".
SHARE = {"CPU": 0.1}


def run_trial(config: dict[str, Any]) -> None:
    """A trial with a learning rate, ``lr``; its files are in ``directory``."""
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
    """What each rank does: it reports after each epoch."""
    import ray.train
    import torch
    from lightning.pytorch import Callback

    from tests.support.ddp_spawn_trainers import seeded
    from tests.support.models import MLP, loader, make_trainer

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

"""Models and a Trainer for the tests of ``ddp_spawn_ext``.

model, trainer = seeded(Stateful), spawn_trainer(max_epochs=2)
trainer.fit(model, loader())  # the trained weights are in this process
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from tests.support.models import MLP, WithBatchNorm, make_trainer

#: Arguments for one device. A distributed sampler would change the order of the samples.
ALONE: dict[str, Any] = {"devices": 1, "use_distributed_sampler": False}


class Stateful(WithBatchNorm):
    """A model with several kinds of states: Adam, a scheduler with a lambda, dropout, batch normalization."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(super().make_net(), nn.Dropout(0.3))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Configurable(MLP):
    """A model whose optimizer and scheduler a test changes between two calls of ``fit``."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01
        self.kind: Any = torch.optim.Adam
        self.weight_decay = 0.0
        self.make_scheduler: Any = None

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        if self.make_scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": self.make_scheduler(optimizer, self), "interval": "step"}]


class HasEverything(MLP):
    """A model with a counter that a hook saves, persistent metrics, a buffer, hyperparameters, and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.steps_seen = 0
        self.metrics = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})
        self.metrics.persistent(True)
        self.register_buffer("average", torch.zeros(3))
        self.save_hyperparameters({"width": 16})

    def training_step(self, batch, batch_idx):
        self.steps_seen += 1
        loss = self.loss(batch)
        self.metrics.update(loss.detach())
        self.average += batch[0].mean()
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["steps_seen"] = self.steps_seen

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Node:
    """An object of a user's class that refers to itself."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.me = self


def spawn_trainer(strategy: Any = "ddp_spawn_ext", **kwargs: Any) -> pl.Trainer:
    return make_trainer(strategy, **kwargs)


def seeded(make_model: Any = MLP) -> Any:
    pl.seed_everything(11, verbose=False)
    return make_model()

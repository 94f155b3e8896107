"""What the tests of ``ddp_spawn_ext`` train, and their Trainer."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from tests.models import MLP, WithBatchNorm, make_trainer


class Stateful(WithBatchNorm):
    """Everything that has a state: Adam, a scheduler with a lambda, dropout, batch normalisation."""

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


def spawn_trainer(strategy: Any = "ddp_spawn_ext", **kwargs: Any) -> pl.Trainer:
    return make_trainer(strategy, **kwargs)


def seeded(make_model: Any = MLP) -> Any:
    pl.seed_everything(11, verbose=False)
    return make_model()

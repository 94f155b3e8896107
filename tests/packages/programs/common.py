"""What the programs have in common: each trains with the strategy that it is given, and says what came of it."""

import json
import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

#: The strategy that the program is to train with; one device where Lightning chooses it.
STRATEGY = os.environ.get("STRATEGY", "auto")
DEVICES = 1 if STRATEGY == "auto" else 2
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def trainer(**kwargs: Any) -> pl.Trainer:
    """A Trainer with that strategy."""
    defaults = {"enable_checkpointing": False, **QUIET, "accelerator": "cpu", "devices": DEVICES, "strategy": STRATEGY}
    return pl.Trainer(**{**defaults, **kwargs})


def show(is_first: bool, **results: Any) -> None:
    """Says, in the first process, what came of it."""
    if is_first:
        print("RESULT", json.dumps(results), flush=True)


def sums(module: nn.Module) -> list[float]:
    """Of each parameter."""
    return [float(parameter.detach().double().sum()) for parameter in module.parameters()]


class Regression(pl.LightningModule):
    """A small network."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)

    def train_dataloader(self):
        return DataLoader(numbers(), batch_size=8)

    def val_dataloader(self):
        return DataLoader(numbers(), batch_size=8)


def numbers(num_samples: int = 64) -> TensorDataset:
    """Samples for :class:`Regression`."""
    inputs = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))

"""What the programs have in common: each trains with the strategy that it is given, and says what came of it."""

import json
import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from tests.support.models import MLP, loader

#: The strategy that the program is to train with; one device where Lightning chooses it.
STRATEGY = os.environ.get("STRATEGY", "auto")
DEVICES = 1 if STRATEGY == "auto" else 2


def trainer(**kwargs: Any) -> pl.Trainer:
    """A Trainer with that strategy."""
    kwargs.setdefault("enable_checkpointing", False)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", devices=DEVICES, strategy=STRATEGY, **quiet, **kwargs)


def show(is_first: bool, **results: Any) -> None:
    """Says, in the first process, what came of it."""
    if is_first:
        print("RESULT", json.dumps(results), flush=True)


def sums(module: nn.Module) -> list[float]:
    """Of each parameter."""
    return [float(parameter.detach().double().sum()) for parameter in module.parameters()]


class Classifier(MLP):
    """The tests' network, with data of its own and a learning rate."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)

    def train_dataloader(self):
        return loader(batch_size=8)

    def val_dataloader(self):
        return loader(batch_size=8)

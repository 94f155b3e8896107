"""Shared functions of the programs. Each program trains with the given strategy, and prints its results as JSON."""

import json
import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from tests.support.models import MLP, loader

#: Strategy of the training; "auto" means one device.
STRATEGY = os.environ.get("STRATEGY", "auto")
DEVICES = 1 if STRATEGY == "auto" else 2
#: Arguments of a Trainer that a library creates.
DISTRIBUTION: dict[str, Any] = {"accelerator": "cpu", "devices": DEVICES, "strategy": STRATEGY}
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def trainer(**kwargs: Any) -> pl.Trainer:
    """Returns a Trainer with this strategy."""
    return pl.Trainer(**{**DISTRIBUTION, **QUIET, "enable_checkpointing": False, **kwargs})


def is_first() -> bool:
    """Returns whether this process is rank 0, or the main process of workers."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def show(**results: Any) -> None:
    """Prints results in rank 0, or in the main process of workers."""
    if is_first():
        print("RESULT", json.dumps(results), flush=True)


def sums(module: nn.Module) -> list[float]:
    """Returns the sum of each parameter."""
    return [float(parameter.detach().double().sum()) for parameter in module.parameters()]


class Classifier(MLP):
    """The network of the tests, with a dataset and a learning rate."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)

    def train_dataloader(self):
        return loader(batch_size=8)

    def val_dataloader(self):
        return loader(batch_size=8)

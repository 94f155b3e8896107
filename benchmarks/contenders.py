"""The training that :mod:`benchmarks.step_time` measures, once under Lightning and once as a hand-written loop.

All contenders train the same model on the same batches with the same optimizer; each returns its time and the weights
it arrived at, so that the program can see that they did the same work.
"""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

NUM_FEATURES = 64
NUM_CLASSES = 10
BATCH_SIZE = 32
LEARNING_RATE = 0.01
#: Batches are used again after so many.
NUM_DISTINCT_BATCHES = 16

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        hidden: Width of the two hidden layers.
        logs_metric: Whether the loss is averaged over ranks in every step.
        accumulate: Batches per optimizer step.
    """

    hidden: int
    logs_metric: bool = False
    accumulate: int = 1

    @property
    def label(self) -> str:
        """The case in words."""
        extra = ["metric"] * self.logs_metric + [f"accumulate {self.accumulate}"] * (self.accumulate > 1)
        return f"h={self.hidden} {' '.join(extra) or 'plain'}"


@dataclass(frozen=True)
class Length:
    """How long one training is, in batches: first those that do not count, then those that are timed."""

    warmup: int
    steps: int

    @property
    def total(self) -> int:
        """All batches."""
        return self.warmup + self.steps


class StepTimer(pl.Callback):
    """Times whole periods of the loop: from the end of the last warm-up batch to the end of the last batch.

    Between two ends lies everything that Lightning's loop does for one batch, what it does between batches included.
    """

    def __init__(self, length: Length) -> None:
        self.length = length
        self.started_at = self.ended_at = 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Reads the clock at the two batches that matter."""
        if batch_idx == self.length.warmup - 1:
            self.started_at = time.perf_counter()
        elif batch_idx == self.length.total - 1:
            self.ended_at = time.perf_counter()

    @property
    def ms_per_step(self) -> float:
        """Milliseconds per batch."""
        return (self.ended_at - self.started_at) * 1e3 / self.length.steps


class Classifier(pl.LightningModule):
    """The MLP of a case, for Lightning."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = make_net(case.hidden)
        self.logs_metric = case.logs_metric

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy, logged if the case asks for it."""
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.logs_metric:
            self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def make_net(hidden: int) -> nn.Module:
    """The same random weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, NUM_CLASSES)
    )


class Batches:
    """Random data of this rank, in memory: neither workers nor samplers take part in what is measured.

    Not a list, which the Trainer would take for a list of data loaders.
    """

    def __init__(self, length: Length) -> None:
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self.length = length
        self.distinct: list[Batch] = [
            (
                torch.randn(BATCH_SIZE, NUM_FEATURES, generator=generator),
                torch.randint(NUM_CLASSES, (BATCH_SIZE,), generator=generator),
            )
            for _ in range(NUM_DISTINCT_BATCHES)
        ]

    def __iter__(self) -> Iterator[Batch]:
        return islice(cycle(self.distinct), self.length.total)

    def __len__(self) -> int:
        return self.length.total


def train_with_lightning(strategy: str, case: Case, length: Length) -> tuple[float, Tensor]:
    """Trains with a Trainer.

    Args:
        strategy: As ``Trainer(strategy=...)`` takes it.
        case: What to train.
        length: How long.

    Returns:
        Milliseconds per step on this rank, and the trained weights as one vector.
    """
    batches = Batches(length)
    module, timer = Classifier(case), StepTimer(length)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=case.accumulate,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        log_every_n_steps=10**9,
    )
    trainer.fit(module, batches)
    return timer.ms_per_step, parameters_to_vector(module.parameters()).detach()


def train_by_hand(case: Case, length: Length) -> tuple[float, Tensor]:
    """Trains with nothing but torch: what is left when a training framework costs nothing.

    Returns:
        Milliseconds per step on this rank, and the trained weights as one vector.
    """
    batches = Batches(length)
    # gradient_as_bucket_view as in ddp_ext: the hand-written loop should be a good one.
    model = DistributedDataParallel(make_net(case.hidden), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    started_at = 0.0
    for index, (features, labels) in enumerate(batches):
        steps_optimizer = (index + 1) % case.accumulate == 0
        if index % case.accumulate == 0:
            optimizer.zero_grad()
        with nullcontext() if steps_optimizer else model.no_sync():
            loss = functional.cross_entropy(model(features), labels)
            (loss / case.accumulate).backward()
        if steps_optimizer:
            optimizer.step()
        if case.logs_metric:
            mean = loss.detach().clone()
            dist.all_reduce(mean)  # gloo has no mean
            mean /= dist.get_world_size()
        if index == length.warmup - 1:
            started_at = time.perf_counter()
    ms_per_step = (time.perf_counter() - started_at) * 1e3 / length.steps
    return ms_per_step, parameters_to_vector(model.parameters()).detach()


def silence_lightning() -> None:
    """Keeps the advice of many Trainers off the terminal."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

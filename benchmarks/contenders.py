"""Training that :mod:`benchmarks.step_time` and :mod:`benchmarks.dp` measure, under Lightning and by hand.

All contenders train the same model on the same batches with the same optimizer. Each contender returns its time and the
trained weights, so that the program can check that all contenders did the same work.
"""

import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from benchmarks.rank_launcher import join
from benchmarks.report import rotated

NUM_FEATURES = 64
NUM_CLASSES = 10
LEARNING_RATE = 0.01
CPU = torch.device("cpu")
#: Number of different batches; later batches repeat them.
NUM_DISTINCT_BATCHES = 16

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A training that is measured.

    Attributes:
        hidden: Width of the two hidden layers, or channels of the first of two convolutions.
        logs_metric: Whether the loss is logged, and averaged over ranks, in every step.
        accumulate: Number of batches per optimizer step.
        is_convolutional: Whether the model is a convolutional net, not an MLP.
        batch_size: Number of samples per process and batch.
        has_batch_norm: Whether each hidden layer is followed by a BatchNorm1d, whose buffers are broadcast.
        num_hidden: Number of hidden layers of the MLP.
    """

    hidden: int
    logs_metric: bool = False
    accumulate: int = 1
    is_convolutional: bool = False
    batch_size: int = 32
    has_batch_norm: bool = False
    num_hidden: int = 2

    @property
    def label(self) -> str:
        """Name of the case."""
        extra = ["BatchNorm"] * self.has_batch_norm
        extra += [f"{2 * self.num_hidden + 2} parameters"] * (self.num_hidden != 2)
        extra += ["metric"] * self.logs_metric + [f"accumulate {self.accumulate}"] * (self.accumulate > 1)
        return f"{'conv' if self.is_convolutional else 'h'}={self.hidden} {' '.join(extra) or 'plain'}"


@dataclass(frozen=True)
class Length:
    """Length of one training in batches: warm-up batches, and timed batches."""

    warmup: int
    steps: int

    @property
    def total(self) -> int:
        """Number of all batches."""
        return self.warmup + self.steps


#: Function that trains a case for a length. It returns the milliseconds per step on this rank, and the trained weights
#: if all ranks have the same weights.
Training = Callable[[Case, Length], tuple[float, Tensor | None]]


class StepTimer(pl.Callback):
    """Times whole periods of the loop: from the end of the last warm-up batch to the end of the last batch.

    The time between two ends contains all work of Lightning's loop for one batch, also the work between batches.
    """

    def __init__(self, length: Length) -> None:
        self.length = length
        self.started_at = self.ended_at = 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Reads the clock at the last warm-up batch and at the last batch."""
        if batch_idx == self.length.warmup - 1:
            self.started_at = time_of_completion()
        elif batch_idx == self.length.total - 1:
            self.ended_at = time_of_completion()

    @property
    def ms_per_step(self) -> float:
        """Number of milliseconds per batch."""
        return (self.ended_at - self.started_at) * 1e3 / self.length.steps


class Classifier(pl.LightningModule):
    """LightningModule of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = make_net(case)
        self.logs_metric = case.logs_metric

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the cross entropy, and logs it if the case requests this."""
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.logs_metric:
            self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns SGD."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def make_net(case: Case) -> nn.Module:
    """Creates the same random weights in each call."""
    torch.manual_seed(0)
    hidden = case.hidden
    if case.is_convolutional:
        # The net of examples/digits.py without its batch normalization, which uses the samples of one replica only.
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, hidden, 3, padding=1),
            nn.GroupNorm(8, hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, 2 * hidden, 3, padding=1),
            nn.GroupNorm(8, 2 * hidden),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * hidden, NUM_CLASSES),
        )
    layers: list[nn.Module] = []
    for num_inputs in [NUM_FEATURES, *[hidden] * (case.num_hidden - 1)]:
        norm = [nn.BatchNorm1d(hidden)] if case.has_batch_norm else []
        layers += [nn.Linear(num_inputs, hidden), *norm, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, NUM_CLASSES))


class Batches:
    """Random data of this rank, in memory, so that the measurement includes neither DataLoader workers nor samplers.

    The class is not a list, because the Trainer would treat a list as several data loaders.
    """

    def __init__(self, case: Case, length: Length) -> None:
        generator = torch.Generator().manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
        self.length = length
        self.distinct: list[Batch] = [
            (
                torch.randn(case.batch_size, NUM_FEATURES, generator=generator),
                torch.randint(NUM_CLASSES, (case.batch_size,), generator=generator),
            )
            for _ in range(NUM_DISTINCT_BATCHES)
        ]

    def __iter__(self) -> Iterator[Batch]:
        return islice(cycle(self.distinct), self.length.total)

    def __len__(self) -> int:
        return self.length.total


class Stream:
    """Batches without a length."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def train_with_lightning(
    strategy: str | Callable[[], Strategy],
    case: Case,
    length: Length,
    *,
    accelerator: str = "cpu",
    devices: int | None = None,
    is_streamed: bool = False,
    callbacks: Callable[[], list[pl.Callback]] = list,
) -> tuple[float, Tensor]:
    """Trains with a Trainer.

    Args:
        strategy: Name of a strategy, or function that creates a strategy.
        case: The case.
        length: Length of the training.
        accelerator: Argument of the Trainer.
        devices: Argument of the Trainer; the number of ranks if None.
        is_streamed: Whether the batches have no length.
        callbacks: Function that creates further callbacks.

    Returns:
        Milliseconds per step on this rank, and the trained weights as one vector.
    """
    batches = Batches(case, length)
    module, timer = Classifier(case), StepTimer(length)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=dist.get_world_size() if devices is None else devices,
        strategy=strategy if isinstance(strategy, str) else strategy(),
        max_epochs=1,
        accumulate_grad_batches=case.accumulate,
        callbacks=[timer, *callbacks()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        log_every_n_steps=10**9,
    )
    trainer.fit(module, Stream(batches) if is_streamed else batches)
    return timer.ms_per_step, parameters_to_vector(module.parameters()).detach().cpu()


def train_alone(case: Case, length: Length) -> tuple[float, None]:
    """Trains on one device in each rank, which gives the time of a step without an exchange.

    Returns:
        Milliseconds per step on this rank, and no weights, because each rank computes different ones.
    """
    return train_with_lightning("auto", case, length, devices=1)[0], None


def train_by_hand(
    case: Case, length: Length, device: torch.device = CPU, process_group: dist.ProcessGroup | None = None
) -> tuple[float, Tensor]:
    """Trains with torch only, which gives the time of a step without a training framework.

    Args:
        case: The case.
        length: Length of the training.
        device: Device of this rank.
        process_group: Group that exchanges gradients; all ranks if None.

    Returns:
        Milliseconds per step on this rank, and the trained weights as one vector.
    """
    batches = Batches(case, length)
    has_gpu = device.type == "cuda"
    # gradient_as_bucket_view as in ddp_ext, so that the hand-written loop is a fair reference.
    model = DistributedDataParallel(
        make_net(case).to(device),
        device_ids=[device] if has_gpu else None,
        gradient_as_bucket_view=True,
        process_group=process_group,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    started_at = 0.0
    for index, (features, labels) in enumerate(batches):
        if has_gpu:
            features, labels = features.to(device, non_blocking=True), labels.to(device, non_blocking=True)
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
            if has_gpu:
                dist.all_reduce(mean, dist.ReduceOp.AVG)
            else:
                dist.all_reduce(mean)  # gloo has no mean
                mean /= dist.get_world_size()
        if index == length.warmup - 1:
            started_at = time_of_completion()
    ms_per_step = (time_of_completion() - started_at) * 1e3 / length.steps
    return ms_per_step, parameters_to_vector(model.parameters()).detach().cpu()


def train_by_hand_in_one_rank(case: Case, length: Length) -> tuple[float, None]:
    """Trains as :func:`train_by_hand` does, each rank in a process group of its own.

    Returns:
        Milliseconds per step on this rank, and no weights, because each rank computes different ones.
    """
    own, _ = dist.new_subgroups(1)
    return train_by_hand(case, length, process_group=own)[0], None


def train_over(backend: str, train: Training, case: Case, length: Length) -> tuple[float, Tensor | None]:
    """Joins a group with this backend, which strategies and hand-written loops use, and trains.

    Returns:
        Result of the training.
    """
    join(backend)
    return train(case, length)


def train_alternately(
    contenders: Mapping[str, Training], case: Case, length: Length, reference: str
) -> dict[str, float]:
    """Trains each contender once, in the given order, and checks that they did the same work.

    Returns:
        Milliseconds per step of each contender.

    Raises:
        RuntimeError: If the weights of a contender differ from the weights of the reference.
    """
    ms: dict[str, float] = {}
    weights: dict[str, Tensor] = {}
    for name, train in contenders.items():
        # The garbage of a contender (a Trainer has many cycles) must not be collected in the time of another contender.
        gc.collect()
        if dist.is_initialized():
            dist.barrier()
        ms[name], vector = train(case, length)
        if vector is not None:
            weights[name] = vector
    check_same_weights(case, weights, reference)
    return ms


def train_in_rounds(
    contenders: Mapping[str, Training], case: Case, length: Length, rounds: int, reference: str
) -> dict[str, list[float]]:
    """Trains the contenders as :func:`train_alternately` does, in an order that changes from round to round.

    Returns:
        Milliseconds per step of each contender in each round.
    """
    ms: dict[str, list[float]] = {name: [] for name in contenders}
    for round_index in range(rounds):
        in_order = {name: contenders[name] for name in rotated(list(contenders), round_index)}
        for name, sample in train_alternately(in_order, case, length, reference).items():
            ms[name].append(sample)
    return ms


def check_same_weights(case: Case, weights: dict[str, Tensor], reference: str) -> None:
    """Checks that contenders did the same work.

    Args:
        case: The case that was trained.
        weights: Trained weights of each contender.
        reference: Contender with which the others are compared.

    Raises:
        RuntimeError: If the weights of a contender differ from the weights of the reference.
    """
    for name, vector in weights.items():
        if not torch.allclose(vector, weights[reference], rtol=1e-4, atol=1e-6):
            difference = (vector - weights[reference]).abs().max().item()
            raise RuntimeError(
                f"{case.label}: the weights of {name} differ from those of {reference} (largest difference"
                f" {difference:.1e}): the contenders did different work."
            )


def time_of_completion() -> float:
    """Returns the time after the GPUs of this process have completed their work."""
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):
                torch.cuda.synchronize(index)
    return time.perf_counter()


def silence_lightning() -> None:
    """Suppresses the log messages of the Trainers."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

"""The training that :mod:`benchmarks.step_time` and :mod:`benchmarks.dp` measure, under Lightning and by hand.

All contenders train the same model on the same batches with the same optimizer; each returns its time and the weights
it arrived at, so that the program can see that they did the same work.
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
#: Batches are used again after so many.
NUM_DISTINCT_BATCHES = 16

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        hidden: Width of the two hidden layers, or channels of the first of two convolutions.
        logs_metric: Whether the loss is logged, and averaged over ranks, in every step.
        accumulate: Batches per optimizer step.
        is_convolutional: Whether it is a convolutional net, not an MLP.
        batch_size: Samples per process and batch.
        has_batch_norm: Whether each hidden layer is followed by a BatchNorm1d, whose buffers are broadcast.
        num_hidden: Hidden layers of the MLP.
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
        """The case in words."""
        extra = ["BatchNorm"] * self.has_batch_norm
        extra += [f"{2 * self.num_hidden + 2} parameters"] * (self.num_hidden != 2)
        extra += ["metric"] * self.logs_metric + [f"accumulate {self.accumulate}"] * (self.accumulate > 1)
        return f"{'conv' if self.is_convolutional else 'h'}={self.hidden} {' '.join(extra) or 'plain'}"


@dataclass(frozen=True)
class Length:
    """How long one training is, in batches: first those that do not count, then those that are timed."""

    warmup: int
    steps: int

    @property
    def total(self) -> int:
        """All batches."""
        return self.warmup + self.steps


#: Trains a case so long; returns the milliseconds per step on this rank, and the weights if all ranks have the same.
Training = Callable[[Case, Length], tuple[float, Tensor | None]]


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
            self.started_at = time_of_completion()
        elif batch_idx == self.length.total - 1:
            self.ended_at = time_of_completion()

    @property
    def ms_per_step(self) -> float:
        """Milliseconds per batch."""
        return (self.ended_at - self.started_at) * 1e3 / self.length.steps


class Classifier(pl.LightningModule):
    """The net of a case, for Lightning."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = make_net(case)
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


def make_net(case: Case) -> nn.Module:
    """The same random weights every time."""
    torch.manual_seed(0)
    hidden = case.hidden
    if case.is_convolutional:
        # The net of examples/digits.py, but for its batch normalisation, which sees the samples of one replica.
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
    """Random data of this rank, in memory: neither workers nor samplers take part in what is measured.

    Not a list, which the Trainer would take for a list of data loaders.
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
    """Batches that have no number."""

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
        strategy: A name that ``Trainer(strategy=...)`` takes, or what makes a strategy.
        case: What to train.
        length: How long.
        accelerator: As ``Trainer(accelerator=...)`` takes it.
        devices: As ``Trainer(devices=...)`` takes it; as many as there are ranks if None.
        is_streamed: Whether the Trainer cannot know how many batches there are.
        callbacks: Makes further callbacks.

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
    """Trains on one device in each rank: the time of a step that exchanges nothing.

    Returns:
        Milliseconds per step on this rank, and no weights, because each rank computes different ones.
    """
    return train_with_lightning("auto", case, length, devices=1)[0], None


def train_by_hand(
    case: Case, length: Length, device: torch.device = CPU, process_group: dist.ProcessGroup | None = None
) -> tuple[float, Tensor]:
    """Trains with nothing but torch: what is left when a training framework costs nothing.

    Args:
        case: What to train.
        length: How long.
        device: Of this rank.
        process_group: The ranks that exchange gradients; all of them if None.

    Returns:
        Milliseconds per step on this rank, and the trained weights as one vector.
    """
    batches = Batches(case, length)
    has_gpu = device.type == "cuda"
    # gradient_as_bucket_view as in ddp_ext: the hand-written loop should be a good one.
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
    """Lets the rank join a group with this backend, then trains: strategies and hand-written loops use what is there.

    Returns:
        What the training returns.
    """
    join(backend)
    return train(case, length)


def train_in_turn(contenders: Mapping[str, Training], case: Case, length: Length, reference: str) -> dict[str, float]:
    """Lets each contender train once, in the order given, and checks that they did the same work.

    Returns:
        For each, milliseconds per step.

    Raises:
        RuntimeError: If one arrived at other weights than the reference.
    """
    ms: dict[str, float] = {}
    weights: dict[str, Tensor] = {}
    for name, train in contenders.items():
        # The garbage of one contender (a Trainer is full of cycles) must not be collected on another's time.
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
    """Lets the contenders train as :func:`train_in_turn` does, in an order that changes from round to round.

    Returns:
        For each, milliseconds per step in each round.
    """
    ms: dict[str, list[float]] = {name: [] for name in contenders}
    for round_index in range(rounds):
        in_order = {name: contenders[name] for name in rotated(list(contenders), round_index)}
        for name, sample in train_in_turn(in_order, case, length, reference).items():
            ms[name].append(sample)
    return ms


def check_same_weights(case: Case, weights: dict[str, Tensor], reference: str) -> None:
    """Checks that contenders did the same work.

    Args:
        case: What they have trained.
        weights: The trained weights of each.
        reference: The contender that the others are compared with.

    Raises:
        RuntimeError: If a contender arrived at other weights than the reference.
    """
    for name, vector in weights.items():
        if not torch.allclose(vector, weights[reference], rtol=1e-4, atol=1e-6):
            difference = (vector - weights[reference]).abs().max().item()
            raise RuntimeError(
                f"{case.label}: {name} arrived at other weights than {reference} (largest difference"
                f" {difference:.1e}): they did not do the same work."
            )


def time_of_completion() -> float:
    """The clock, once the GPUs that this process uses have done what they were given."""
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):
                torch.cuda.synchronize(index)
    return time.perf_counter()


def silence_lightning() -> None:
    """Keeps the advice of many Trainers off the terminal."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

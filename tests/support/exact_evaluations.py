"""Random evaluations with ``exact_evaluation=True`` that a rank runs, and that have known results.

    outcomes = RankPool(case.world_size).run(evaluate, case, limit_s=60)
    assert outcomes[0].value["values"] == values_of(case)  # of `exact_results`

Samples are integers. Each value that a rank logs, gathers, reduces, or computes with a metric is a sum, a mean, or a
maximum of samples.
"""

import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import CatMetric, MeanMetric, Metric

from lightning_strategies_ext import DDPStrategy
from tests.support.models import make_trainer

#: Kinds of DataLoaders. Lightning shards the dataset of "shards"; the others have samples of each rank. "sized stream"
#: is an ``IterableDataset`` with a length. "batches" is an iterable that is no DataLoader.
KINDS = ("shards", "stream", "sized stream", "batches")
#: Hooks in which user code calls collectives, once per step or once per evaluation.
STEP_HOOKS = ("batch_start", "step", "batch_end", "callback_batch_start", "callback_batch_end")
EPOCH_HOOKS = ("epoch_start", "epoch_end", "callback_epoch_end")
CALLS = ("all_gather", "all_gather_dict", "sum", "mean", "barrier", "broadcast", "compute")
CALLS += ("log_mean", "log_sum", "log_max")
METRICS: dict[str, type[Metric]] = {"mean": MeanMetric, "cat": CatMetric}
#: Number of training batches of each rank in ``fit``, each of which is followed by a validation.
NUM_TRAINING_BATCHES = 2
#: Time of the package's failure monitor. It is shorter than the time limit of a case, so that the error has all stacks.
HANG_TIMEOUT_S = 40.0


@dataclass(frozen=True)
class Samples:
    """The samples of one DataLoader.

    Attributes:
        kind: One of :data:`KINDS`.
        lengths: Number of samples of the dataset for "shards", else of each rank.
        batch_size: Largest number of samples in a batch.
        drop_last: Whether the DataLoader drops the last batch if it is smaller.
    """

    kind: str
    lengths: tuple[int, ...]
    batch_size: int
    drop_last: bool = False

    def batches_of(self, rank: int, world_size: int, index: int) -> list[list[int]]:
        """Returns all batches of a rank, in the DataLoader with an index."""
        first = 100 * (index + 1)
        if self.kind == "shards":
            samples = range(first + rank, first + self.lengths[0], world_size)
        else:
            first += sum(self.lengths[:rank])
            samples = range(first, first + self.lengths[rank])
        batches = [[*samples[start : start + self.batch_size]] for start in range(0, len(samples), self.batch_size)]
        is_dropped = self.drop_last and self.kind != "batches"
        return [batch for batch in batches if len(batch) == self.batch_size or not is_dropped]


@dataclass(frozen=True)
class Case:
    """A random evaluation.

    Attributes:
        world_size: Number of ranks.
        backend: Backend of the process group.
        stage: "validate", "test", or "fit".
        loaders: DataLoaders, which run one after the other.
        limit: Argument ``limit_val_batches`` or ``limit_test_batches``.
        num_sanity_steps: Argument ``num_sanity_val_steps`` of the Trainer.
        calls: Collectives by the hook that calls them.
        metrics: Metrics of torchmetrics, some of :data:`METRICS`.
        has_buffers: Whether the model has buffers.
        changes_batches: Whether a batch is a dict from which the model removes the samples.
        logs_steps: Whether values are logged per step, too.
    """

    world_size: int
    backend: str
    stage: str
    loaders: tuple[Samples, ...]
    limit: float = 1.0
    num_sanity_steps: int = 0
    calls: tuple[tuple[str, str], ...] = ()
    metrics: tuple[str, ...] = ()
    has_buffers: bool = False
    changes_batches: bool = False
    logs_steps: bool = False

    def batches_of(self, rank: int, index: int, *, is_sanity_check: bool = False) -> list[list[int]]:
        """Returns the batches of a DataLoader that a rank evaluates."""
        batches = self.loaders[index].batches_of(rank, self.world_size, index)
        limit = self.limit if isinstance(self.limit, int) else int(len(batches) * self.limit)
        return batches[: min(limit, self.num_sanity_steps) if is_sanity_check else limit]


class Stream(IterableDataset[Any]):
    """A dataset that yields given samples."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class SizedStream(Stream):
    """A dataset that yields given samples, with a length."""

    def __len__(self) -> int:
        return len(self.samples)


class Batches:
    """An iterable over batches that is no DataLoader."""

    def __init__(self, batches: list[list[int]], collates: "Collates") -> None:
        self.batches, self.collates = batches, collates

    def __iter__(self) -> Iterator[Any]:
        return map(self.collates, self.batches)


class Steps:
    """The steps that a rank has run. The strategy does not take back the contents of this object."""

    def __init__(self) -> None:
        self.steps: list[tuple[bool, list[int]]] = []


class Model(pl.LightningModule):
    """A model that calls the collectives of a case.

    Attributes:
        evaluations: What this rank has after each evaluation: the samples that it has seen, and results by name.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.layer = nn.Linear(1, 1)
        self.norm = nn.BatchNorm1d(1) if case.has_buffers else nn.Identity()
        for name in case.metrics:
            setattr(self, name, nn.ModuleList(METRICS[name]() for _ in case.loaders))
        self.evaluations: list[dict[str, Any]] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(self.norm(batch.view(-1, 1))).sum()

    def on_validation_epoch_start(self) -> None:
        random.seed(0)
        self.steps = Steps()
        self.seen: list[int] = []
        self.results: dict[str, list[float]] = defaultdict(list)
        self.at_start = self.first_buffer()
        self.make_calls("epoch_start", [1 + self.global_rank])

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch.pop("samples") if isinstance(batch, dict) else batch

    def on_validation_batch_start(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.current = batch.tolist()
        self.make_calls("batch_start", self.current)

    def validation_step(self, samples: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.steps.steps.append((self.trainer.strategy.is_shadowing, samples.tolist()))
        self.seen += samples.tolist()
        random.random()
        self.norm(samples.float().view(-1, 1))
        self.make_calls("step", self.current)
        for name in self.case.metrics:
            metric = getattr(self, name)[dataloader_idx]
            metric.update(samples.float())
            if name != "cat":  # its value is not a number
                self.log(f"metric_{name}", metric)

    def on_validation_batch_end(self, *args: Any) -> None:
        self.make_calls("batch_end", self.current)

    def on_validation_epoch_end(self) -> None:
        drawn = random.random()
        self.make_calls("epoch_end", self.seen)
        for metric in getattr(self, "cat", ()):
            self.results["cat"] += sorted(torch.as_tensor(metric.compute()).flatten().tolist())
            metric.reset()
        self.evaluations.append(
            {
                "is_sanity_check": self.trainer.sanity_checking,
                "seen": self.seen,
                "steps": self.steps.steps,
                "results": self.results,
                "random": drawn,
                "buffer": (self.at_start, self.first_buffer()),
            }
        )

    on_test_epoch_start, on_test_batch_start = on_validation_epoch_start, on_validation_batch_start
    test_step, on_test_batch_end, on_test_epoch_end = validation_step, on_validation_batch_end, on_validation_epoch_end

    def first_buffer(self) -> float:
        return self.norm.running_mean.item() if self.case.has_buffers else 0.0

    def make_calls(self, hook: str, samples: list[int]) -> None:
        """Makes the calls of a hook with the samples of a step or of an evaluation."""
        for name, call in self.case.calls:
            if name == hook:
                self.results[f"{hook} {call}"] += self.make_call(hook, call, samples)

    def make_call(self, hook: str, call: str, samples: list[int]) -> list[float]:
        total = torch.tensor([float(sum(samples))])
        strategy: Any = self.trainer.strategy
        if call == "all_gather":
            return numbers_of(self.all_gather(total))
        if call == "all_gather_dict":
            gathered = self.all_gather({"total": total, "number": torch.tensor(len(samples))})
            return numbers_of(gathered["total"]) + numbers_of(gathered["number"])
        if call in ("sum", "mean"):
            return strategy.reduce(total, reduce_op=call).tolist()
        if call == "broadcast":
            return [strategy.broadcast(self.trainer.world_size)]
        if call == "barrier":
            strategy.barrier()
            return []
        if call == "compute":  # its value in a step includes shadowed samples, but that at the end does not
            for name in self.case.metrics:
                for metric in getattr(self, name):
                    metric.compute()
            return []
        is_mean = call == "log_mean" and hook in STEP_HOOKS
        value = total[0] / len(samples) if is_mean else total[0]
        options: dict[str, Any] = {"reduce_fx": call.removeprefix("log_")}
        if hook in EPOCH_HOOKS:
            options["batch_size"] = 1
        on_step = self.case.logs_steps and hook in STEP_HOOKS
        self.log(f"{hook}_{call}", value, sync_dist=True, on_step=on_step, on_epoch=True, **options)
        return []


def numbers_of(gathered: Tensor) -> list[float]:
    """Returns the number of ranks that have taken part, and the values of the ranks."""
    return [len(gathered), *gathered.flatten().tolist()]


class Calls(pl.Callback):
    """A callback that calls the collectives of a case."""

    def on_validation_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        module.make_calls("callback_batch_start", args[0].tolist())

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        module.make_calls("callback_batch_end", module.current)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.make_calls("callback_epoch_end", module.seen)

    on_test_batch_start, on_test_batch_end = on_validation_batch_start, on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end


def evaluate(case: Case) -> dict[str, Any]:
    """Runs a case on this rank; returns its evaluations and its logged values."""
    torch.manual_seed(0)
    model = Model(case)
    stage_limit = "limit_test_batches" if case.stage == "test" else "limit_val_batches"
    options = {
        stage_limit: case.limit,
        "num_sanity_val_steps": case.num_sanity_steps,
        "val_check_interval": 1,
        "max_epochs": 1,
        "callbacks": [Calls()],
    }
    strategy = DDPStrategy(exact_evaluation=True, process_group_backend=case.backend, hang_timeout=HANG_TIMEOUT_S)
    trainer = make_trainer(strategy, case.world_size, **options)
    rank = int(os.environ["LOCAL_RANK"])
    loaders = [loader_of(case, rank, index) for index in range(len(case.loaders))]
    if case.stage == "fit":
        samples = torch.arange(4.0 * case.world_size)
        trainer.fit(model, DataLoader(samples, batch_size=4 // NUM_TRAINING_BATCHES), loaders)
    else:
        getattr(trainer, case.stage)(model, loaders, verbose=False)
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"evaluations": model.evaluations, "values": values}


def loader_of(case: Case, rank: int, index: int) -> Any:
    samples = case.loaders[index]
    if samples.kind == "batches":
        return Batches(samples.batches_of(rank, case.world_size, index), Collates(case))
    dataset: Any
    if samples.kind == "shards":
        dataset = [100 * (index + 1) + number for number in range(samples.lengths[0])]
    else:
        own = Samples(samples.kind, samples.lengths, 1).batches_of(rank, case.world_size, index)
        dataset = (SizedStream if samples.kind == "sized stream" else Stream)([number for (number,) in own])
    options = {"batch_size": samples.batch_size, "drop_last": samples.drop_last}
    return DataLoader(dataset, **options, collate_fn=Collates(case))


class Collates:
    """Makes a batch of samples."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __call__(self, samples: list[int]) -> Any:
        batch = torch.tensor(samples)
        return {"samples": batch} if self.case.changes_batches else batch

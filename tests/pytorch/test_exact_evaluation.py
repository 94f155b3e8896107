"""``exact_evaluation=True``: every sample counts once in ``validate``, ``test``, and the validation of ``fit``."""

import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchmetrics import AUROC, Accuracy, MeanMetric

from lightning_strategies_ext import (
    DDPSpawnElasticStrategy,
    DDPSpawnStrategy,
    DDPStrategy,
    HorovodStrategy,
    UnevenInputsError,
)
from tests.support.horovod_ranks import run_horovod
from tests.support.models import MLP, make_trainer
from tests.support.ranks import run_ranks

NUMBERS = (101, 1, 2, 5)
BATCH_SIZES = (1, 7, 64)
#: Further arguments of the Trainer and of the DataLoader.
FIT: dict[str, Any] = {"stage": "fit", "num_sanity_val_steps": 2, "val_check_interval": 1, "max_epochs": 2}


class Counted(Callback):
    """Keeps the samples of this rank in its attributes."""

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        self.seen: list[int] = []
        self.num_batches = 0

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        self.seen += batch[0].tolist()
        self.num_batches += 1

    on_test_epoch_start, on_test_batch_end = on_validation_epoch_start, on_validation_batch_end


class Scores(MLP):
    """Evaluates samples ``(index, score, label)`` with metrics, logged values, and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)
        self.accuracy, self.auroc, self.mean = Accuracy("binary"), AUROC("binary"), MeanMetric()
        self.register_buffer("evaluated", torch.zeros(1, dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.norm(batch[1].view(-1, 1)).sum() + sum(each.sum() for each in self.net.parameters())

    def on_validation_epoch_start(self) -> None:
        self.seen: list[int] = []
        self.by_label: dict[int, list[int]] = {0: [], 1: []}
        self.total = torch.zeros(1, dtype=torch.int64)
        self.count = 0
        self.gathered: list[Tensor] = []
        self.evaluated.zero_()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        indices, scores, labels = batch
        self.norm(scores.view(-1, 1))
        self.accuracy.update(scores, labels)
        self.auroc.update(scores, labels)
        self.mean.update(scores)
        self.log_dict({"accuracy": self.accuracy, "auroc": self.auroc, "metric": self.mean})
        self.log("mean", scores.mean(), sync_dist=True)
        self.log("step", scores.sum(), on_step=True, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log("largest", scores.max(), reduce_fx="max", sync_dist=True)
        self.seen += indices.tolist()
        for index, label in zip(indices.tolist(), labels.tolist(), strict=True):
            self.by_label[label].append(index)
        self.total += indices.sum()
        self.evaluated += len(indices)
        self.count += len(indices)
        self.drawn = torch.rand(1).item(), random.random()
        self.gathered.append(self.all_gather(indices.sum()).sum())

    def on_validation_epoch_end(self) -> None:
        own = torch.stack([self.total[0], torch.tensor(self.count), self.evaluated[0]])
        self.sums = self.all_gather(own).view(-1, 3).sum(0).tolist()

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end
    on_test_epoch_start = on_validation_epoch_start


def loader_of(number: int, batch_size: int, **kwargs: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(number)
    scores = torch.rand(number, generator=generator)
    labels = (torch.rand(number, generator=generator) < scores).long()
    return DataLoader(TensorDataset(torch.arange(number), scores, labels), batch_size=batch_size, **kwargs)


def evaluate(
    strategy: Any,
    world_size: int,
    loaders: Any,
    stage: str = "validate",
    make_model: Callable[[], Any] = Scores,
    callbacks: tuple[Callback, ...] = (),
    **kwargs: Any,
) -> dict[str, Any]:
    """Returns what this rank has after an evaluation."""
    torch.manual_seed(0)
    model, counted = make_model(), Counted()
    trainer = make_trainer(strategy, world_size, callbacks=[counted, *callbacks], **{"max_epochs": 1, **kwargs})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if stage == "fit":
            trainer.fit(model, loader_of(8, 4 // world_size), loaders)
        else:
            getattr(trainer, stage)(model, loaders, verbose=False)
    return {
        "values": {key: value.item() for key, value in trainer.callback_metrics.items()},
        "sums": model.sums,
        "seen": model.seen,
        "by_label": model.by_label,
        "by_callback": counted.seen,
        "gathered": int(sum(model.gathered)),
        "num_batches": counted.num_batches,
        "random": (torch.rand(1).item(), random.random()),
        "buffers": [model.norm.running_mean.item(), model.norm.num_batches_tracked.item()],
        "is_shadowing": trainer.strategy.is_shadowing if world_size > 1 else False,
        "warnings": [str(each.message) for each in caught if "exactly once" in str(each.message)],
    }


def strategy_of(world_size: int, **kwargs: Any) -> Any:
    if world_size == 1:
        return "auto"
    return DDPStrategy(exact_evaluation=True, process_group_backend="shm" if world_size == 2 else "gloo", **kwargs)


def assert_equal_to_one_device(one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["values"] == pytest.approx(one["values"], rel=1e-5)
        assert rank["sums"] == one["sums"]
        assert rank["seen"] == rank["by_callback"]
        assert rank["buffers"] == ranks[0]["buffers"]
        assert not rank["is_shadowing"]
        assert rank["warnings"] == []
    assert ranks[0]["gathered"] == one["gathered"]  # a rank that shadows a step drops what it has gathered in it
    assert sorted(index for rank in ranks for index in rank["seen"]) == sorted(one["seen"])
    for label, indices in one["by_label"].items():
        assert sorted(index for rank in ranks for index in rank["by_label"][label]) == sorted(indices)


def evaluate_all(world_size: int) -> list[dict[str, Any]]:
    cases = [(number, batch_size) for number in NUMBERS for batch_size in BATCH_SIZES]
    stages: list[dict[str, Any]] = [{}, {"stage": "test"}, FIT]
    return [
        evaluate(strategy_of(world_size), world_size, loader_of(number, batch_size), **stage)
        for stage in (stages if world_size != 3 else stages[:1])
        for number, batch_size in (cases if stage == {} else cases[1::3])
    ]


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
def test_results_are_those_of_one_device(world_size: int) -> None:
    expected = evaluate_all(1)
    of_ranks = run_ranks(evaluate_all, world_size, world_size=world_size)
    for one, *ranks in zip(expected, *of_ranks, strict=world_size == 2):
        assert_equal_to_one_device(one, ranks)


class LogsAlone(Scores):
    """Logs a value that ranks without samples do not have."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log("alone", batch[1].mean() * batch[0].sum())


def evaluate_options(world_size: int) -> list[dict[str, Any]]:
    def run(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return evaluate(strategy_of(world_size), world_size, *args, **kwargs)

    stops = {"callbacks": (EarlyStopping("alone", patience=5),), "make_model": LogsAlone}
    return [
        run(loader_of(12, 6 // world_size), limit_val_batches=1),
        run(loader_of(9, 2, shuffle=True)),
        run(CombinedLoader(loader_of(5, 2), "min_size")),
        run(loader_of(1, 1), **{**FIT, **stops}),
    ]


def samples_with_options() -> dict[str, list[int]]:
    """Returns the samples that this rank evaluates."""
    rank = int(os.environ["LOCAL_RANK"])

    def run(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return evaluate(DDPStrategy(exact_evaluation=True), 2, *args, **kwargs)

    padded = evaluate(DDPStrategy(), 2, loader_of(5, 2))
    own = DistributedSampler(loader_of(5, 2).dataset, 2, rank, shuffle=False)
    stream = DataLoader(Stream(rank), batch_size=None)
    return {
        "padded": [*padded["seen"], len(padded["warnings"])],
        "limit of a rank": run(loader_of(7, 1), limit_val_batches=0.5)["seen"],
        "limits of a rank": run([loader_of(7, 2), loader_of(3, 1)], stage="test", limit_test_batches=1)["seen"],
        "last batch": run(loader_of(13, 7, drop_last=True))["seen"],
        "own sampler": run(DataLoader(loader_of(5, 2).dataset, sampler=own))["seen"],
        "stream": run(stream)["seen"],
        "stream too": run([loader_of(4, 2), stream])["seen"],
    }


class Stream(IterableDataset[Any]):
    """Batches of one sample each, the same number on each rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return iter([*loader_of(6, 1)][self.rank :: 2])


@pytest.mark.processes
def test_options_of_the_trainer_and_the_data_loaders_apply_on_each_rank() -> None:
    for one, *ranks in zip(evaluate_options(1), *run_ranks(evaluate_options, 2), strict=True):
        of_rank_0 = ranks[0]["values"].pop("alone", None)
        assert of_rank_0 == one["values"].pop("alone", None)
        ranks[1]["values"].pop("alone", None)
        assert_equal_to_one_device(one, ranks)
    first, second = run_ranks(samples_with_options)
    assert (first["padded"], second["padded"]) == ([0, 2, 4, 1], [1, 3, 0, 0])
    assert (first["limit of a rank"], second["limit of a rank"]) == ([0, 2], [1])
    assert (first["limits of a rank"], second["limits of a rank"]) == ([0, 2, 0], [1, 3, 1])
    assert (first["last batch"], second["last batch"]) == ([0, 2, 4, 6, 8, 10, 12], [])
    assert (first["own sampler"], second["own sampler"]) == ([0, 2, 4], [1, 3, 0])
    assert (first["stream"], second["stream"]) == ([0, 2, 4], [1, 3, 5])
    assert (first["stream too"], second["stream too"]) == ([0, 2, 0, 2, 4], [1, 3, 1, 3, 5])


class Shard(IterableDataset[Any]):
    """Samples with the given indices."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        samples = loader_of(16, 1).dataset
        return (samples[index] for index in self.indices)


#: The samples of both ranks in each DataLoader; a number stands for a DataLoader of its size.
STREAMS: list[Any] = [5, ([0, 1, 2], [])]


def stream(parts: Any, rank: int | None) -> DataLoader[Any]:
    if isinstance(parts, int):
        return loader_of(parts, 2)
    return DataLoader(Shard([*parts[0], *parts[1]] if rank is None else parts[rank]), batch_size=2)


class Ragged(Scores):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.all_gather({"indices": batch[0]})


class Iterates(Scores):
    def validation_step(self, dataloader_iter: Any) -> None:
        next(dataloader_iter)


REFUSED: dict[str, tuple[Callable[[], Any], type[Scores], str]] = {
    "ragged": (
        lambda: loader_of(5, 7),
        Ragged,
        r"different shapes \(\[3\] on rank 0, \[2\] on rank 1\).*exact_evaluation=True",
    ),
    "iterator": (lambda: loader_of(5, 1), Iterates, "takes `dataloader_iter`"),
    "parallel": (lambda: CombinedLoader([loader_of(5, 1)] * 2, "max_size"), Scores, "mode='sequential'"),
}


def errors_of_refused() -> dict[str, str]:
    errors = {}
    for name, (loaders, make_model, _) in REFUSED.items():
        with pytest.raises((ValueError, UnevenInputsError)) as caught:
            evaluate(DDPStrategy(exact_evaluation=True), 2, loaders(), make_model=make_model)
        errors[name] = str(caught.value)
    return errors


@pytest.mark.processes
def test_an_evaluation_that_cannot_be_exact_is_an_error_on_all_ranks() -> None:
    for errors in run_ranks(errors_of_refused):
        for name, (_, _, text) in REFUSED.items():
            assert re.search(text, errors[name]), errors[name]


def test_the_argument_is_a_flag() -> None:
    with pytest.raises(TypeError, match="`exact_evaluation` must be True or False, got 1"):
        DDPStrategy(exact_evaluation=1)  # type: ignore[arg-type]


@pytest.mark.processes
def test_spawned_and_elastic_workers() -> None:
    one = evaluate("auto", 1, loader_of(5, 1))
    with DDPSpawnStrategy(exact_evaluation=True) as strategy:
        result = evaluate(strategy, 2, loader_of(5, 1))
    in_fit = evaluate(DDPSpawnElasticStrategy(exact_evaluation=True), 2, loader_of(5, 1), **FIT)
    for each in (result, in_fit):
        assert each["values"] == pytest.approx(one["values"], rel=1e-5)
        assert (each["sums"], each["seen"]) == (one["sums"], [0, 2, 4])


class LogsShadowing(Scores):
    """Keeps whether each step is a shadowed one."""

    def on_fit_start(self) -> None:
        self.shadowed: dict[str, list[bool]] = {"train": [], "validate": []}

    def train_dataloader(self) -> Any:
        data = loader_of(4 if self.global_rank else 8, 2).dataset
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 1, 0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.shadowed["train"].append(self.trainer.strategy.is_shadowing)
        return super().training_step(batch, batch_idx)

    def on_validation_batch_start(self, *args: Any) -> None:
        self.shadowed["validate"] = [*self.shadowed["validate"], self.trainer.strategy.is_shadowing]


def shadowed_steps_of_both() -> dict[str, list[bool]]:
    model = LogsShadowing()
    strategy = DDPStrategy(exact_evaluation=True, uneven_inputs="join")
    trainer = make_trainer(strategy, max_epochs=1, val_check_interval=1, num_sanity_val_steps=0)
    trainer.fit(model, val_dataloaders=loader_of(3, 1))
    return model.shadowed


@pytest.mark.processes
def test_a_rank_that_shadows_training_steps_evaluates_its_samples() -> None:
    first, second = run_ranks(shadowed_steps_of_both)
    assert first == {"train": [False] * 4, "validate": [False] * 8}
    assert second == {"train": [False, False, True, True], "validate": [False] * 4}  # shadowed ones are taken back


class GathersRows(Scores):
    """Gathers tensors of different lengths, which Horovod concatenates."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rows = [self.all_gather(batch[0]).flatten().tolist()]
        self.rows = [*getattr(self, "rows", []), *rows]


def rows_over_horovod(number: int, batch_size: int) -> list[list[int]]:
    model = GathersRows()
    make_trainer(HorovodStrategy(exact_evaluation=True)).validate(model, loader_of(number, batch_size), verbose=False)
    return model.rows


def evaluate_over_horovod(world_size: int) -> list[dict[str, Any]]:
    def run(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return evaluate(
            HorovodStrategy(exact_evaluation=True) if world_size > 1 else "auto", world_size, *args, **kwargs
        )

    rank = int(os.environ["HOROVOD_RANK"]) if world_size > 1 else None
    return [
        *(run(loader_of(number, batch_size)) for number, batch_size in [(101, 7), (1, 1), (5, 1)]),
        run([loader_of(8, 2), loader_of(1, 2)], stage="test"),
        *(run(loader_of(number, 1), **FIT) for number in (1, 5)),
        run([stream(each, rank) for each in STREAMS]),
        *([rows_over_horovod(3, 7), rows_over_horovod(3, 1)] if world_size > 1 else []),
    ]


@pytest.mark.processes
def test_horovods_ranks() -> None:
    first, second = run_horovod("horovodrun", evaluate_over_horovod, 2)
    for one, *ranks in zip(evaluate_over_horovod(1), first, second, strict=False):
        assert_equal_to_one_device(one, ranks)
    assert first[-2:] == [[[0, 2, 1]], [[0, 1], [2]]]
    assert second[-2:] == [[[0, 2, 1]], [[0, 1]]]

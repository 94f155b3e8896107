"""Metrics of torchmetrics that Lightning computes at the end of an epoch: one exchange, and the values of ``ddp``."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import (
    AUROC,
    Accuracy,
    ConfusionMatrix,
    F1Score,
    MeanMetric,
    Metric,
    MetricCollection,
    MinMaxMetric,
    PearsonCorrCoef,
)

from lightning_strategies_ext import DDPStrategy, LoggedKeysError
from lightning_strategies_ext.collectives import LocalCollectives
from lightning_strategies_ext.pytorch import metric_states
from tests.pytorch.test_logged_values import ComparesLater
from tests.support.horovod_ranks import try_horovod
from tests.support.models import MLP, make_trainer
from tests.support.ranks import leave_process_group, outcomes_of_ranks, run_ranks

BINARY = {"task": "binary"}
#: In each of two epochs: one of the validation, one of its end, and one of training. In the test, two.
NUM_EXCHANGES = 2 * 3 + 2


class Largest(Metric):
    """A metric whose reduction is a function of the user."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("seen", torch.zeros(2, dtype=torch.int64), dist_reduce_fx=lambda of_ranks: of_ranks.amax(0))
        self.seen: Tensor

    def update(self, labels: Tensor) -> None:
        self.seen = torch.stack([labels.max(), labels.max()]).maximum(self.seen)

    def compute(self) -> Tensor:
        return self.seen.sum()


class Scores(MLP):
    """Logs metrics of many kinds of samples ``(index, score, label)``."""

    def __init__(self) -> None:
        super().__init__()
        self.collection = MetricCollection([Accuracy(**BINARY), F1Score(**BINARY), ConfusionMatrix(**BINARY)])
        self.exact = AUROC(**BINARY)  # two list states, of floats and of integers
        self.mean, self.of_epoch = MeanMetric(), MeanMetric()
        self.correlation = PearsonCorrCoef()  # states without a reduction
        self.largest = Largest()
        self.train_mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _, scores, _ = batch
        self.train_mean.update(scores)
        self.log("train_mean", self.train_mean, on_step=False, on_epoch=True)
        return self.net(scores.view(-1, 1).expand(-1, self.net[0].in_features)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        indices, scores, labels = batch
        self.collection.update(scores, labels)
        self.log_dict({name: each for name, each in self.collection.items() if name != "BinaryConfusionMatrix"})
        self.exact.update(scores, labels)
        self.mean.update(scores)
        self.correlation.update(scores, labels.float())
        self.largest.update(labels + indices)
        self.log_dict({"exact": self.exact, "mean": self.mean, "correlation": self.correlation})
        self.log("largest", self.largest)
        self.log("again", self.mean)

    def on_validation_epoch_end(self) -> None:
        self.of_epoch.update(float(self.global_rank))
        self.log("of_epoch", self.of_epoch)

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end


def samples() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    indices, scores = torch.arange(64), torch.rand(64, generator=generator)
    labels = (torch.rand(64, generator=generator) < scores).long()
    return DataLoader(TensorDataset(indices, scores, labels), batch_size=4)


def values_with(make_strategy: Callable[[], Any], devices: int = 2) -> tuple[list[dict[str, float]], Counter[str]]:
    """Returns the values after ``fit`` and ``test``, and the numbers of all-gathers of torchmetrics and of states."""
    calls: Counter[str] = Counter()
    gather, gather_bytes = dist.all_gather, metric_states.gather_bytes

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls["all_gather"] += 1
        return gather(*args, **kwargs)

    def counted_states(*args: Any) -> Any:
        calls["states"] += 1
        return gather_bytes(*args)

    dist.all_gather, metric_states.gather_bytes = counted, counted_states
    try:
        pl.seed_everything(5, verbose=False)
        trainer = make_trainer(make_strategy(), devices, max_epochs=2)
        model = Scores()
        trainer.fit(model, samples(), samples())
        fitted = {key: value.item() for key, value in trainer.callback_metrics.items()}
        (tested,) = trainer.test(model, samples(), verbose=False)
    finally:
        dist.all_gather, metric_states.gather_bytes = gather, gather_bytes
        if dist.is_initialized():
            leave_process_group()
    return [fitted, dict(tested)], calls


def over(backend: str) -> Any:
    return DDPStrategy(process_group_backend=backend)


def stock() -> Any:
    return "ddp"


def values_with_all() -> list[Any]:
    return [values_with(make) for make in (stock, partial(over, "shm"), partial(over, "gloo"), ComparesLater)]


@pytest.mark.processes
def test_values_are_bitwise_those_of_ddp_without_a_gather_of_torchmetrics() -> None:
    for (expected, stock_calls), *ext in run_ranks(values_with_all):
        assert len(expected[0]) == 9
        assert stock_calls["all_gather"] > 30
        for values, calls in ext:
            assert values == expected
            assert calls == {"states": NUM_EXCHANGES}


@pytest.mark.processes
def test_values_are_those_of_one_process() -> None:
    expected, _ = values_with(lambda: "auto", 1)
    ((values, _), _) = run_ranks(values_with, partial(over, "shm"))
    for ext, alone in zip(values, expected, strict=True):
        assert {**ext, "of_epoch": 0.0} == pytest.approx({**alone, "of_epoch": 0.0}, abs=1e-6)
        assert ext["of_epoch"] == 0.5


def horovod() -> Any:
    return "horovod_ext"


@pytest.mark.processes
def test_values_over_horovod_are_those_of_one_process() -> None:
    expected, _ = values_with(lambda: "auto", 1)
    _, outcomes = try_horovod("horovodrun", values_with, horovod)
    for values, _ in outcomes.values():
        for ext, alone in zip(values, expected, strict=True):
            assert {**ext, "of_epoch": 0.0} == pytest.approx({**alone, "of_epoch": 0.0}, abs=1e-6)


# --- states that only some ranks have ---


class Keeps(MLP):
    """Rank 0 has integers, and rank 1 none; the metric returns their sum."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.other = Listed(**settings)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.other.update(torch.tensor([[batch_idx, 2**53 + 1]]))
        self.log("other", self.other)


class Listed(Metric):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.add_state("rows", [], **settings)
        self.rows: Any

    def update(self, row: Tensor) -> None:
        self.rows.append(row)

    def compute(self) -> Tensor:
        rows = torch.cat(self.rows) if isinstance(self.rows, list) else self.rows
        assert rows.dtype == torch.int64
        return rows[:, 1].max() - 2**53


def validate_with_rows(settings: dict[str, Any]) -> float:
    trainer = make_trainer(over("shm"), limit_val_batches=3)
    (values,) = trainer.validate(Keeps(settings), samples(), verbose=False)
    return values["other"]


@pytest.mark.processes
def test_a_list_state_that_a_rank_lacks_keeps_its_dtype() -> None:
    assert run_ranks(validate_with_rows, {"dist_reduce_fx": "cat"}) == [1.0, 1.0]


@pytest.mark.processes
def test_lists_without_a_reduction_that_differ_in_length_are_an_error_on_all_ranks() -> None:
    for outcome in outcomes_of_ranks(validate_with_rows, {"dist_reduce_fx": None}):
        assert "The states of the metric 'other' consist of 3 tensors on rank 0, but of 0 on rank 1" in outcome.error


class LogsOther(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MeanMetric(), MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.first.update(1.0)
        self.second.update(1.0)
        self.log("first", self.first)
        self.log(*(("second", self.second) if self.global_rank == 0 else ("third", self.second)))


def validate_other_metrics() -> None:
    make_trainer(over("gloo")).validate(LogsOther(), samples(), verbose=False)


@pytest.mark.processes
def test_a_metric_that_only_one_rank_logs_is_an_error_that_names_it() -> None:
    for outcome in outcomes_of_ranks(validate_other_metrics):
        assert LoggedKeysError.__name__ in outcome.error
        assert "Rank 0 reduces logged values ['second'] in validation_step (" in outcome.error
        assert "rank 1 reduces ['third'] in validation_step (" in outcome.error


class HasNoBatches(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def val_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        return DataLoader(TensorDataset(*(tensor[: 24 * (1 - rank)] for tensor in samples().dataset.tensors)), 4)


def validate_without_batches_of_rank_1() -> dict[str, float]:
    trainer = make_trainer(over("shm"), use_distributed_sampler=False)
    (values,) = trainer.validate(Scores(), HasNoBatches(), verbose=False)
    return dict(values)


@pytest.mark.processes
def test_a_rank_without_batches_computes_the_metrics_of_the_other_ranks() -> None:
    first, second = run_ranks(validate_without_batches_of_rank_1)
    data = HasNoBatches()
    data.trainer = make_trainer("auto", 1)
    (alone,) = data.trainer.validate(Scores(), HasNoBatches(), verbose=False)
    assert first == second
    assert {**first, "of_epoch": 0.0} == pytest.approx(alone, abs=1e-6)


# --- bytes ---

CPU = torch.device("cpu")
STATES = (
    torch.tensor(2.5),
    torch.arange(6).view(2, 3).T,
    torch.tensor([True, False, True]),
    torch.tensor([], dtype=torch.float64),
    torch.tensor([1 + 2j]),
    torch.arange(3, dtype=torch.bfloat16),
    torch.arange(5, dtype=torch.uint8),
)


def test_states_are_the_same_after_they_were_bytes() -> None:
    first, second = metric_states.from_bytes(metric_states.to_bytes([STATES, STATES[:1]], CPU))
    for tensor, expected in zip((*first, *second), (*STATES, *STATES[:1]), strict=True):
        assert tensor.dtype == expected.dtype
        assert tensor.shape == expected.shape
        assert torch.equal(tensor, expected)


def test_equal_states_occur_once() -> None:
    state = torch.rand(10_000)
    once = metric_states.to_bytes([[state]], CPU)
    twice = metric_states.to_bytes([[state], [state.clone(), state + 1]], CPU)
    assert len(twice) - len(once) < 40_000 + 200
    assert torch.equal(metric_states.from_bytes(twice)[1][0], state)


def test_large_states_are_gathered_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_states, "_MAX_GATHERED_NUM_BYTES", 64)
    data = torch.arange(160, dtype=torch.uint8)
    collectives = LocalCollectives(0, 1)
    assert torch.equal(metric_states.gather_bytes(collectives, data, 176)[0][:160], data)


@pytest.mark.parametrize(
    "metric",
    [
        MinMaxMetric(MeanMetric()),
        MeanMetric(sync_on_compute=False),
        MeanMetric(dist_sync_on_step=True),
        MeanMetric(process_group="group"),
        MeanMetric(dist_sync_fn=lambda tensor, group: [tensor]),
        MeanMetric(compute_with_cache=False),
    ],
)
def test_metrics_with_settings_of_their_own_are_left_to_torchmetrics(metric: Metric) -> None:
    assert not metric_states.is_gathered(metric, "cpu")
    assert metric_states.is_gathered(MeanMetric(), "cpu")


def test_metrics_on_the_cpu_are_left_to_torchmetrics_if_the_rank_has_a_gpu() -> None:
    # The device "meta" stands for a GPU.
    assert metric_states.is_gathered(MeanMetric().to("meta"), "meta")
    assert not metric_states.is_gathered(MeanMetric(), "meta")
    assert not metric_states.is_gathered(MeanMetric(compute_on_cpu=True).to("meta"), "meta")

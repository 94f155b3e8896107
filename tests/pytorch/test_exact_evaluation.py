"""``exact_evaluation=True``: every sample counts once in ``validate``, ``test``, and the validation of ``fit``."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import AUROC, Accuracy, MeanMetric

from lightning_strategies_ext import DDPStrategy
from tests.support.models import MLP, make_trainer
from tests.support.ranks import run_ranks

NUMBERS = (101, 1, 2, 5)
BATCH_SIZES = (1, 7, 64)


class Counted(Callback):
    """Counts the samples of this rank in its attributes."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.num_batches = 0

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        self.seen += batch[0].tolist()
        self.num_batches += 1

    on_test_batch_end = on_validation_batch_end


class Scores(MLP):
    """Evaluates samples ``(index, score, label)`` with metrics, logged values, and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)
        self.accuracy, self.auroc, self.mean = Accuracy("binary"), AUROC("binary"), MeanMetric()
        self.seen: list[int] = []
        self.by_label: dict[int, list[int]] = {0: [], 1: []}
        self.total = torch.zeros(1, dtype=torch.int64)
        self.count = 0
        self.draws: list[float] = []
        self.gathered: list[Tensor] = []
        self.register_buffer("evaluated", torch.zeros(1, dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.norm(batch[1].view(-1, 1)).sum() + sum(each.sum() for each in self.net.parameters())

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
        self.draws.append(torch.rand(1).item())
        self.gathered.append(self.all_gather(indices.sum()).sum())

    def on_validation_epoch_end(self) -> None:
        own = torch.stack([self.total[0], torch.tensor(self.count), self.evaluated[0]])
        self.sums = self.all_gather(own).view(-1, 3).sum(0).tolist()

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end


def loader_of(number: int, batch_size: int, **kwargs: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(number)
    scores = torch.rand(number, generator=generator)
    labels = (torch.rand(number, generator=generator) < scores).long()
    return DataLoader(TensorDataset(torch.arange(number), scores, labels), batch_size=batch_size, **kwargs)


def evaluate(strategy: Any, devices: int, stage: str, loaders: Any) -> dict[str, Any]:
    """Returns what this rank has after an evaluation."""
    torch.manual_seed(0)
    model, counted = Scores(), Counted()
    trainer = make_trainer(strategy, devices, callbacks=[counted], max_epochs=1)
    if stage == "fit":
        trainer.fit(model, loader_of(8, 4), loaders)
    else:
        getattr(trainer, stage)(model, loaders, verbose=False)
    return {
        "values": {key: value.item() for key, value in trainer.callback_metrics.items()},
        "sums": model.sums,
        "seen": model.seen,
        "by_label": model.by_label,
        "by_callback": counted.seen,
        "gathered": int(sum(model.gathered)),
        "num_steps": (len(model.draws), counted.num_batches),
        "random": torch.rand(1).item(),
    }


def evaluate_all(world_size: int, **kwargs: Any) -> list[dict[str, Any]]:
    return [
        evaluate(
            DDPStrategy(exact_evaluation=True, process_group_backend="gloo") if world_size > 1 else "auto",
            world_size,
            stage,
            loader_of(number, batch_size),
        )
        for stage in ("validate", "test", "fit")
        for number in NUMBERS
        for batch_size in BATCH_SIZES
    ]


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
def test_results_are_those_of_one_device(world_size: int) -> None:
    expected = evaluate_all(1)
    for one, *ranks in zip(expected, *run_ranks(evaluate_all, world_size, world_size=world_size), strict=True):
        for rank in ranks:
            assert rank["values"] == pytest.approx(one["values"], rel=1e-5)
            assert rank["sums"] == one["sums"]
            assert rank["seen"] == rank["by_callback"]
            assert rank["random"] == one["random"] or len(rank["seen"]) < len(one["seen"])
        assert sorted(index for rank in ranks for index in rank["seen"]) == sorted(one["seen"])
        for label in one["by_label"]:
            assert sorted(index for rank in ranks for index in rank["by_label"][label]) == one["by_label"][label]

"""``ddp_ext`` against Lightning's ``ddp``: logs, decisions, tuning, predictions, checkpoints, synchronized layers."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_strategies_ext._lightning import strategy_parts
from tests.support.models import (
    MLP,
    WithBatchNorm,
    assert_same_bits,
    fit,
    loader,
    make_trainer,
    state_of,
)
from tests.support.ranks import leave_process_group, run_ranks

pytestmark = pytest.mark.processes

try:
    from lightning.pytorch.callbacks import EMAWeightAveraging
except ImportError:  # before Lightning 2.6
    EMAWeightAveraging = None


class WithMetrics(MLP):
    """A torchmetrics object, reductions of every kind, and a value per step."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("synced", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)
        for reduce_fx in ("mean", "sum", "min", "max"):
            self.log(reduce_fx, self.loss(batch), sync_dist=True, reduce_fx=reduce_fx)


def log_with_both(directory: str) -> list[dict[str, Any]]:
    """Returns the decisions of callbacks and the logged values, with both strategies."""
    seen = []
    for name in ("ddp_ext", "ddp"):
        pl.seed_everything(11, verbose=False)
        stopping = EarlyStopping("mean", patience=1, min_delta=10.0)
        checkpoint = ModelCheckpoint(
            f"{directory}/{name}", monitor="accuracy", mode="max", save_top_k=2, save_last=True
        )
        trainer = make_trainer(name, callbacks=[stopping, checkpoint], enable_checkpointing=True, max_epochs=6)
        model = WithMetrics()
        trainer.fit(model, loader(), loader(60))
        validated = trainer.validate(model, loader(60), verbose=False)
        tested = trainer.test(model, loader(60), verbose=False, ckpt_path="best")
        seen.append(
            {
                "stopped": (trainer.current_epoch, stopping.stopped_epoch),
                "best": checkpoint.best_model_path.replace(f"/{name}/", "/"),
                "scores": checkpoint.best_model_score.item(),
                "top": sorted(path.replace(f"/{name}/", "/") for path in checkpoint.best_k_models),
                "metrics": {key: value.item() for key, value in trainer.callback_metrics.items()},
                "validated": validated,
                "tested": tested,
            }
        )
        leave_process_group()
    return seen


def test_callbacks_and_metrics_decide_as_with_stock(tmp_path):
    first, second = run_ranks(log_with_both, str(tmp_path))
    for ext, stock in (first, second):
        assert ext == stock
    assert first[0]["stopped"][1] == 1  # early stopping has stopped the training
    assert sorted(p.name for p in (tmp_path / "ddp_ext").iterdir()) == sorted(
        p.name for p in (tmp_path / "ddp").iterdir()
    )


class Tunable(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.learning_rate = 1e-3
        self.batch_size = 2

    def train_dataloader(self):
        return loader(batch_size=self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def find_learning_rate_with_both(directory: str) -> list[Any]:
    found = []
    for name in ("ddp_ext", "ddp"):
        pl.seed_everything(11, verbose=False)
        finder = LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
        model = Tunable()
        make_trainer(name, callbacks=[finder], default_root_dir=directory, max_epochs=1).fit(model)
        found.append((model.learning_rate, finder.optimal_lr.results, state_of(model)["net.0.weight"].tolist()))
        leave_process_group()
    return found


def test_learning_rate_finder_finds_what_it_finds_with_stock(tmp_path):
    for ext, stock in run_ranks(find_learning_rate_with_both, str(tmp_path)):
        assert ext == stock
        assert ext[0] != Tunable().learning_rate


def refuse_batch_size_finder() -> list[str]:
    messages = []
    for name in ("ddp_ext", "ddp"):
        with pytest.raises(MisconfigurationException) as caught:
            make_trainer(name, callbacks=[BatchSizeFinder()]).fit(Tunable())
        messages.append(str(caught.value))
    return messages


def test_batch_size_finder_is_refused_with_several_ranks_as_with_stock():
    for ext, stock in run_ranks(refuse_batch_size_finder):
        assert "`BatchSizeFinder`" in ext
        assert "not supported with distributed strategies" in stock


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: list[Any] = []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, dataloader_idx):
        self.batches.append((indices, prediction))

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.epoch.append((indices, predictions))


def predict_with_both() -> list[Any]:
    results = []
    for name in ("ddp_ext", "ddp"):
        pl.seed_everything(3, verbose=False)
        writer = Writer()
        trainer = make_trainer(name, callbacks=[writer])
        predictions = trainer.predict(MLP(), loader(22))
        results.append((predictions, writer.batches, writer.epoch))
        leave_process_group()
    return results


def flatten(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in flatten(part)]
    return value.flatten().tolist() if isinstance(value, torch.Tensor) else [value]


def test_predictions_and_their_indices_are_those_of_stock():
    for ext, stock in run_ranks(predict_with_both):
        assert flatten(ext) == flatten(stock)
        assert len(flatten(ext)) > 100


def resume_across(first: str, second: str, path: str) -> dict[str, torch.Tensor]:
    """Trains two epochs with one strategy, saves, and trains two more epochs with the other strategy."""
    trainer, _ = fit(first)
    trainer.save_checkpoint(path)
    model = MLP()
    make_trainer(second, max_epochs=4).fit(model, loader(), ckpt_path=path)
    return state_of(model)


def test_checkpoints_are_interchangeable_with_those_of_stock(tmp_path):
    names = [("ddp", "ddp"), ("ddp", "ddp_ext"), ("ddp_ext", "ddp"), ("ddp_ext", "ddp_ext")]
    states = [run_ranks(resume_across, a, b, str(tmp_path / f"{a}-{b}.ckpt"))[0] for a, b in names]
    for state in states[1:]:
        assert_same_bits(state, states[0])


class SyncedOnCpu(torch.nn.BatchNorm1d):
    """A layer that replaces SyncBatchNorm, which supports GPUs only."""


class LayerSyncOnCpu(LayerSync):
    """A plugin that replaces layers for training and restores them afterwards, like TorchSyncBatchNorm."""

    def apply(self, model):
        model.net[1].__class__ = SyncedOnCpu
        return model

    def revert(self, model):
        model.net[1].__class__ = torch.nn.BatchNorm1d
        return model


class RecordNormalization(pl.Callback):
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def on_train_start(self, trainer, module):
        self.kinds.append(type(module.net[1]).__name__)

    on_validation_start = on_train_start


def convert_and_revert() -> list[str]:
    """Trains, and returns the class of the normalization layer in each stage."""
    record = RecordNormalization()
    trainer, model = fit("ddp_ext", WithBatchNorm, plugins=[LayerSyncOnCpu()], callbacks=[record])
    trainer.validate(model, loader(), verbose=False)
    return [*record.kinds, type(trainer.strategy.model.net[1]).__name__]


def test_synchronized_layers_exist_during_training_and_are_reverted_after():
    assert run_ranks(convert_and_revert) == [["SyncedOnCpu", "BatchNorm1d", "BatchNorm1d"]] * 2


@pytest.mark.forked
def test_sync_batchnorm_converts_and_reverts_every_layer():
    strategy = make_trainer("ddp_ext", devices=1, sync_batchnorm=True).strategy
    layer_sync = strategy_parts.layer_sync(strategy)
    model = layer_sync.apply(WithBatchNorm())
    assert isinstance(model.net[1], torch.nn.SyncBatchNorm)
    model = layer_sync.revert(model)
    assert not isinstance(model.net[1], torch.nn.SyncBatchNorm)
    assert model.eval().net(torch.ones(2, 8)).shape == (2, 3)

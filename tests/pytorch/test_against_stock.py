"""``ddp_ext`` against Lightning's ``ddp``: same seed, two CPU ranks, the same weights to the last bit.

Each test trains with both strategies, one after the other, in the same two processes: stock over gloo, ours over shm.
With more ranks the bits are the same on the same backend only: gloo adds up in another order than shm does.
"""

from collections.abc import Callable
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
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_strategies_ext import DDPStrategy, _lightning
from tests.support.models import (
    MLP,
    TwoOptimizers,
    WithBatchNorm,
    WithUnusedParameters,
    assert_same_bits,
    dataset,
    fit,
    loader,
    make_trainer,
    state_of,
)
from tests.support.ranks import leave_process_group, run_ranks

try:
    from lightning.pytorch.callbacks import EMAWeightAveraging
except ImportError:  # before Lightning 2.6
    EMAWeightAveraging = None


def train_with_both(
    make_model: Callable[[], pl.LightningModule], variant: str, make_kwargs: Callable[[], dict[str, Any]]
) -> tuple[dict, dict]:
    """One rank: the weights after training with stock and with ours."""
    theirs = fit(f"ddp{variant}", make_model, **make_kwargs())
    assert torch.distributed.get_backend() == "gloo"
    leave_process_group()
    ours = fit(f"ddp_ext{variant}", make_model, **make_kwargs())
    assert torch.distributed.get_backend() == "shm"
    assert isinstance(ours[0].strategy, DDPStrategy)
    assert ours[0].global_step == theirs[0].global_step > 0
    assert ours[0].callback_metrics == theirs[0].callback_metrics
    return state_of(ours[1]), state_of(theirs[1])


def assert_same_weights(
    make_model: Callable[[], pl.LightningModule] = MLP,
    make_kwargs: Callable[[], dict[str, Any]] = dict,
    variant: str = "",
) -> None:
    outcomes = run_ranks(train_with_both, make_model, variant, make_kwargs)
    for ours, theirs in outcomes:
        assert_same_bits(ours, theirs)
    if make_model is not WithBatchNorm:  # the ranks' running statistics differ after the last forward, as with stock
        assert_same_bits(outcomes[0][0], outcomes[1][0])
    torch.manual_seed(11)
    assert any(not torch.equal(t, outcomes[0][0][n]) for n, t in make_model().state_dict().items()), "nothing trained"


@pytest.mark.parametrize("make_model", [MLP, WithBatchNorm])
def test_same_bits(make_model):
    assert_same_weights(make_model)


def train_with_three_ranks(strategy: str, backend: str | None = None) -> tuple[dict, str]:
    """The weights after training, and what the ranks have talked over."""
    _, model = fit(strategy if backend is None else DDPStrategy(process_group_backend=backend), devices=3)
    return state_of(model), torch.distributed.get_backend()


def test_with_three_ranks_the_bits_are_those_of_stock_on_its_backend_and_close_to_them_on_shm():
    stock, gloo, shm, again = (
        run_ranks(train_with_three_ranks, *strategy, world_size=3)
        for strategy in (("ddp",), ("ddp_ext", "gloo"), ("ddp_ext",), ("ddp_ext",))
    )
    assert [ranks[0][1] for ranks in (stock, gloo, shm)] == ["gloo", "gloo", "shm"]
    for rank in range(3):
        assert_same_bits(gloo[rank][0], stock[rank][0])
        assert_same_bits(shm[rank][0], shm[0][0])
        assert_same_bits(again[rank][0], shm[0][0])
        for name, tensor in shm[rank][0].items():
            torch.testing.assert_close(tensor, stock[rank][0][name], rtol=1e-5, atol=1e-6)


def accumulate_three() -> dict[str, Any]:
    return {"accumulate_grad_batches": 3}


@pytest.mark.parametrize("make_model", [MLP, WithBatchNorm])
def test_same_bits_with_gradient_accumulation(make_model):
    assert_same_weights(make_model, accumulate_three)


def test_same_bits_with_two_optimizers_under_manual_optimization():
    assert_same_weights(TwoOptimizers, variant="_find_unused_parameters_true")  # each uses half of the parameters


@pytest.mark.parametrize("make_kwargs", [dict, accumulate_three])
def test_same_bits_with_unused_parameters(make_kwargs):
    assert_same_weights(WithUnusedParameters, make_kwargs, "_find_unused_parameters_true")


def bf16() -> dict[str, Any]:
    return {"precision": "bf16-mixed"}


def clip_norm() -> dict[str, Any]:
    return {"gradient_clip_val": 0.05}


def clip_value() -> dict[str, Any]:
    return {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2}


def double() -> dict[str, Any]:
    return {"precision": "64-true"}


def average_weights() -> dict[str, Any]:
    return {"callbacks": [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)], "max_epochs": 4}


def average_weights_exponentially() -> dict[str, Any]:
    return {"callbacks": [EMAWeightAveraging(decay=0.9)]}


def overfit() -> dict[str, Any]:
    return {"overfit_batches": 2}


@pytest.mark.parametrize("make_kwargs", [bf16, double, clip_norm, clip_value, average_weights, overfit])
def test_same_bits_with_trainer_features(make_kwargs):
    assert_same_weights(MLP, make_kwargs)


@pytest.mark.skipif(EMAWeightAveraging is None, reason="this Lightning has no weight averaging callback (2.6 has)")
def test_same_bits_with_weight_averaging_callback():
    assert_same_weights(MLP, average_weights_exponentially)


class WithoutLogging(MLP):
    """torch 2.13 cannot compile `self.log` of Lightning 2.6, whatever the strategy."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


def compiled_with_both() -> tuple[dict, dict]:
    states = []
    for name in ("ddp_ext", "ddp"):
        pl.seed_everything(11, verbose=False)
        model = WithoutLogging()
        trainer = make_trainer(name)
        trainer.fit(torch.compile(model, backend="aot_eager"), loader())
        states.append(state_of(model))
        leave_process_group()
    return states[0], states[1]


def test_same_bits_with_torch_compile():
    for ours, theirs in run_ranks(compiled_with_both):
        assert_same_bits(ours, theirs)


class WithZeroRedundancyOptimizer(MLP):
    def configure_optimizers(self):
        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)


def test_same_bits_with_zero_redundancy_optimizer():
    assert_same_weights(WithZeroRedundancyOptimizer)


class Shards(IterableDataset):
    """Each rank takes every other sample."""

    def __iter__(self):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        yield from list(dataset())[rank::2]


class OverIterableDataset(MLP):
    def train_dataloader(self):
        return DataLoader(Shards(), batch_size=4)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return loader(shuffle=True)

    def val_dataloader(self):
        return loader()

    test_dataloader = predict_dataloader = val_dataloader


def fit_from(source: str) -> tuple[dict, dict, dict, dict]:
    states, metrics = [], []
    for name in ("ddp_ext", "ddp"):
        pl.seed_everything(11, verbose=False)
        trainer = make_trainer(name)
        if source == "datamodule":
            model = MLP()
            trainer.fit(model, datamodule=Data())
        else:
            model = OverIterableDataset()
            trainer.fit(model)
        states.append(state_of(model))
        metrics.append({name: value.item() for name, value in trainer.callback_metrics.items()})
        leave_process_group()
    return states[0], states[1], metrics[0], metrics[1]


@pytest.mark.parametrize("source", ["datamodule", "iterable"])
def test_same_bits_over_data_modules_and_iterable_datasets(source):
    for ours, theirs, our_metrics, their_metrics in run_ranks(fit_from, source):
        assert_same_bits(ours, theirs)
        assert our_metrics == their_metrics
        assert our_metrics


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
    """What callbacks decided and what was logged, with ours and with stock."""
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
    for ours, theirs in (first, second):
        assert ours == theirs
    assert first[0]["stopped"][1] == 1  # early stopping did stop
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
    for ours, theirs in run_ranks(find_learning_rate_with_both, str(tmp_path)):
        assert ours == theirs
        assert ours[0] != Tunable().learning_rate


def refuse_batch_size_finder() -> list[str]:
    messages = []
    for name in ("ddp_ext", "ddp"):
        with pytest.raises(MisconfigurationException) as caught:
            make_trainer(name, callbacks=[BatchSizeFinder()]).fit(Tunable())
        messages.append(str(caught.value))
    return messages


def test_batch_size_finder_is_refused_with_several_ranks_as_with_stock():
    for ours, theirs in run_ranks(refuse_batch_size_finder):
        assert ours == theirs


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
    for ours, theirs in run_ranks(predict_with_both):
        assert flatten(ours) == flatten(theirs)
        assert len(flatten(ours)) > 100


def resume_across(first: str, second: str, path: str) -> dict[str, torch.Tensor]:
    """Two epochs with one strategy, saved, two more with the other."""
    trainer, _ = fit(first)
    trainer.save_checkpoint(path)
    model = MLP()
    make_trainer(second, max_epochs=4).fit(model, loader(), ckpt_path=path)
    return state_of(model)


def test_checkpoints_go_from_stock_to_ours_and_back(tmp_path):
    names = [("ddp", "ddp"), ("ddp", "ddp_ext"), ("ddp_ext", "ddp"), ("ddp_ext", "ddp_ext")]
    states = [run_ranks(resume_across, a, b, str(tmp_path / f"{a}-{b}.ckpt"))[0] for a, b in names]
    for state in states[1:]:
        assert_same_bits(state, states[0])


class SyncedOnCpu(torch.nn.BatchNorm1d):
    """Stands where torch puts SyncBatchNorm, which computes on GPUs only."""


class LayerSyncOnCpu(LayerSync):
    """Exchanges layers for training and back, as TorchSyncBatchNorm does."""

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
    """The kind of normalisation in each stage."""
    record = RecordNormalization()
    trainer, model = fit("ddp_ext", WithBatchNorm, plugins=[LayerSyncOnCpu()], callbacks=[record])
    trainer.validate(model, loader(), verbose=False)
    return [*record.kinds, type(trainer.strategy.model.net[1]).__name__]


def test_synchronised_layers_are_there_for_training_and_reverted_after():
    assert run_ranks(convert_and_revert) == [["SyncedOnCpu", "BatchNorm1d", "BatchNorm1d"]] * 2


@pytest.mark.forked
def test_sync_batchnorm_converts_and_reverts_every_layer():
    strategy = make_trainer("ddp_ext", devices=1, sync_batchnorm=True).strategy
    layer_sync = _lightning.layer_sync(strategy)
    model = layer_sync.apply(WithBatchNorm())
    assert isinstance(model.net[1], torch.nn.SyncBatchNorm)
    model = layer_sync.revert(model)
    assert not isinstance(model.net[1], torch.nn.SyncBatchNorm)
    assert model.eval().net(torch.ones(2, 8)).shape == (2, 3)


def single_process_reference(num_epochs: int = 2) -> dict[str, torch.Tensor]:
    """Plain torch, one process, each step on the batches of both ranks together."""
    pl.seed_everything(11, verbose=False)
    model = MLP()
    optimizer = model.configure_optimizers()
    samples = dataset()
    samplers = [DistributedSampler(samples, 2, rank, seed=11) for rank in range(2)]  # as Lightning shards
    for epoch in range(num_epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches_of_ranks = [DataLoader(samples, 4, sampler=sampler) for sampler in samplers]
        for batches in zip(*batches_of_ranks, strict=True):
            features, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
            optimizer.zero_grad()
            functional.cross_entropy(model.net(features), labels).backward()
            optimizer.step()
    return state_of(model)


def test_two_ranks_train_like_one_process_on_the_whole_batch():
    ours = run_ranks(train_with_both, MLP, "", dict)[0][0]
    for name, tensor in single_process_reference().items():
        torch.testing.assert_close(ours[name], tensor)

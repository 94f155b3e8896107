"""``ddp_ext`` against Lightning's ``ddp``: with one seed and two CPU ranks, weights are bitwise identical.

Each test trains with both strategies, one after the other, in the same two processes: Lightning's over gloo, this
package's over shm. With more ranks, results are identical only on the same backend, because gloo and shm add in
different orders.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    StochasticWeightAveraging,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_strategies_ext import DDPStrategy
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

pytestmark = pytest.mark.processes

try:
    from lightning.pytorch.callbacks import EMAWeightAveraging
except ImportError:  # before Lightning 2.6
    EMAWeightAveraging = None


def train_with_both(
    make_model: Callable[[], pl.LightningModule], variant: str, make_kwargs: Callable[[], dict[str, Any]]
) -> tuple[dict, dict]:
    """Trains with both strategies on one rank; returns the weights with this package's and Lightning's strategy."""
    stock = fit(f"ddp{variant}", make_model, **make_kwargs())
    assert torch.distributed.get_backend() == "gloo"
    leave_process_group()
    ext = fit(f"ddp_ext{variant}", make_model, **make_kwargs())
    assert torch.distributed.get_backend() == "shm"
    assert isinstance(ext[0].strategy, DDPStrategy)
    assert ext[0].global_step == stock[0].global_step > 0
    assert ext[0].callback_metrics == stock[0].callback_metrics
    return state_of(ext[1]), state_of(stock[1])


def assert_same_weights(
    make_model: Callable[[], pl.LightningModule] = MLP,
    make_kwargs: Callable[[], dict[str, Any]] = dict,
    variant: str = "",
) -> None:
    outcomes = run_ranks(train_with_both, make_model, variant, make_kwargs)
    for ext, stock in outcomes:
        assert_same_bits(ext, stock)
    if (
        make_model is not WithBatchNorm
    ):  # the ranks' running statistics differ after the last forward, as with Lightning's strategy
        assert_same_bits(outcomes[0][0], outcomes[1][0])
    torch.manual_seed(11)
    assert any(not torch.equal(t, outcomes[0][0][n]) for n, t in make_model().state_dict().items()), "nothing trained"


@pytest.mark.parametrize("make_model", [MLP, WithBatchNorm])
def test_same_bits(make_model):
    assert_same_weights(make_model)


def train_with_three_ranks(strategy: str, backend: str | None = None) -> tuple[dict, str]:
    """Returns the weights after training, and the backend."""
    _, model = fit(strategy if backend is None else DDPStrategy(process_group_backend=backend), devices=3)
    return state_of(model), torch.distributed.get_backend()


def test_three_ranks_train_bitwise_as_stock_over_gloo_and_close_to_it_over_shm():
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
    assert_same_weights(
        TwoOptimizers, variant="_find_unused_parameters_true"
    )  # each optimizer uses half of the parameters


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
    """torch 2.13 cannot compile `self.log` of Lightning 2.6, with any strategy."""

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
    for ext, stock in run_ranks(compiled_with_both):
        assert_same_bits(ext, stock)


class WithZeroRedundancyOptimizer(MLP):
    def configure_optimizers(self):
        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)


def test_same_bits_with_zero_redundancy_optimizer():
    assert_same_weights(WithZeroRedundancyOptimizer)


class Shards(IterableDataset):
    """Each rank has every second sample."""

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
        # Lightning then uses the limit as the length, and does not detect the last batch of a shorter stream.
        limit = {"limit_train_batches": 10, "accumulate_grad_batches": 3} if source == "iterable below limit" else {}
        trainer = make_trainer(name, **limit)
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


@pytest.mark.parametrize("source", ["datamodule", "iterable", "iterable below limit"])
def test_same_bits_over_data_modules_and_iterable_datasets(source):
    for ext, stock, ext_metrics, stock_metrics in run_ranks(fit_from, source):
        assert_same_bits(ext, stock)
        assert ext_metrics == stock_metrics
        assert ext_metrics


def single_process_reference(num_epochs: int = 2) -> dict[str, torch.Tensor]:
    """Trains with torch alone in one process; each step uses the batches of both ranks."""
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
    ext = run_ranks(train_with_both, MLP, "", dict)[0][0]
    for name, tensor in single_process_reference().items():
        torch.testing.assert_close(ext[name], tensor)

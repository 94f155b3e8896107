"""``static_graph=True`` with manual optimization or accumulation: every step has the gradients of all ranks.

In the first pass, DDP only records the graph. Weights are compared bitwise with Lightning's ``ddp`` without a static
graph, and with one process.
"""

from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy

from lightning_strategies_ext import DDPSpawnStrategy, DDPStrategy
from lightning_strategies_ext.torch_distributed import bucket_search
from tests.pytorch.test_unfreezing import Manual, Needs, Net
from tests.support.models import assert_same_bits, make_trainer, state_of
from tests.support.ranks import leave_process_group, outcomes_of_ranks, run_ranks

pytestmark = pytest.mark.processes


class TwoOptimizers(Manual):
    """Manual optimization with one backward pass for two optimizers."""

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.backbone.parameters(), lr=0.1), torch.optim.Adam(self.head.parameters(), lr=0.01)


class TwoPasses(Manual):
    """Manual optimization with two backward passes per step, each followed by an optimizer step."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        super().training_step(batch, batch_idx)


class OnePassBlocked(Manual):
    """A model that blocks the exchange in every second pass of a step; the first pass exchanges gradients."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        if self.trainer.world_size > 1:
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.loss(batch))
        else:
            self.manual_backward(self.loss(batch))


class FirstPassBlocked(Manual):
    """Manual optimization with a step after two passes, of which the first pass exchanges nothing."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with self.trainer.strategy.block_backward_sync() if self.trainer.world_size > 1 else nullcontext():
            self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch))
        optimizer.step()


class OnePassEach(Manual):
    """Two optimizers, each with a backward pass through its part of the model."""

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        losses = [lambda: self.backbone(batch[0]).pow(2).mean(), lambda: self.loss(batch)]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.backbone.parameters(), lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)


class EditsGradients(Manual):
    """A model that edits gradients after each backward pass, also after the first; they must be those of all ranks."""

    def on_after_backward(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1e-3, 2e-3)


CASES = (Manual, TwoOptimizers, TwoPasses, EditsGradients, OnePassBlocked)
#: Further arguments of the strategy with a static graph.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "shm": {},
    "gloo": {"process_group_backend": "gloo"},
    "joined": {"uneven_inputs": "join"},
    "gradients kept twice": {"gradient_as_bucket_view": False},
    "unused parameters": {"find_unused_parameters": True},
    "buckets by trial": {"bucket_cap_mb": "auto"},
}


def train(
    strategy: Any,
    kind: type[Net],
    devices: int = 2,
    num_fits: int = 1,
    callback: Callback | None = None,
    accumulate_grad_batches: int = 1,
):
    """Returns the weights after one or several calls of ``fit`` on one Trainer."""
    pl.seed_everything(11, verbose=False)
    model = kind()
    callbacks = [] if callback is None else [callback]
    trainer = make_trainer(
        strategy,
        devices,
        callbacks=callbacks,
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate_grad_batches,
    )
    for number in range(num_fits):
        trainer.fit_loop.max_epochs = number + 1
        trainer.fit(model)
    return state_of(model)


def train_with_both() -> dict[str, tuple[Any, Any]]:
    bucket_search.SIZES_MB = (2**-11,)  # type: ignore[misc]
    found = {}
    stock = {kind: train(LightningDDPStrategy(), kind) for kind in CASES}
    stock_again = train(LightningDDPStrategy(), Manual, num_fits=2)
    leave_process_group()
    for kind in CASES:
        found[kind.__name__] = train(DDPStrategy(static_graph=True), kind), stock[kind]
    found["second fit"] = train(DDPStrategy(static_graph=True), Manual, num_fits=2), stock_again
    for name, arguments in ARGUMENTS.items():
        if "process_group_backend" in arguments:
            leave_process_group()
        found[name] = train(DDPStrategy(static_graph=True, **arguments), Manual), stock[Manual]
    return found


def test_weights_are_those_without_a_static_graph():
    first, second = run_ranks(train_with_both)
    for case, (ext, stock) in first.items():
        assert_same_bits(ext, stock)
        assert_same_bits(ext, second[case][0])
    for kind in CASES[:-1]:
        for name, value in train("auto", kind, 1).items():
            torch.testing.assert_close(first[kind.__name__][0][name], value)


def train_unfrozen() -> Any:
    return train(DDPStrategy(static_graph=True), Manual, callback=Needs(lambda number: number >= 5))


def test_the_first_step_after_unfreezing_exchanges_all_gradients():
    first, second = run_ranks(train_unfrozen)
    assert_same_bits(first, second)
    for name, value in train("auto", Manual, 1, callback=Needs(lambda number: number >= 5)).items():
        torch.testing.assert_close(first[name], value)


@pytest.mark.forked
def test_spawned_workers_train_a_static_graph_in_each_fit():
    with DDPSpawnStrategy(static_graph=True) as strategy:
        weights = train(strategy, Manual, num_fits=2)
    for name, value in train("auto", Manual, 1, num_fits=2).items():
        torch.testing.assert_close(weights[name], value)


#: Trainings whose first backward pass exchanges nothing without a static graph.
ACCUMULATING: dict[str, dict[str, Any]] = {
    "manual": {"kind": FirstPassBlocked},
    "automatic": {"kind": Net, "accumulate_grad_batches": 2},
    "second fit": {"kind": Net, "accumulate_grad_batches": 3, "num_fits": 2},
}


def train_accumulating() -> dict[str, Any]:
    found = {name: train(DDPStrategy(static_graph=True), **options) for name, options in ACCUMULATING.items()}
    joined = DDPStrategy(static_graph=True, uneven_inputs="join")
    return {**found, "joined": train(joined, Net, accumulate_grad_batches=2)}


def test_gradients_that_accumulate_from_the_first_pass_on_are_those_of_one_process():
    first, second = run_ranks(train_accumulating)
    alone = {name: train("auto", devices=1, **options) for name, options in ACCUMULATING.items()}
    alone["joined"] = alone["automatic"]
    for name, weights in alone.items():
        assert_same_bits(first[name], second[name])
        for key, value in weights.items():
            torch.testing.assert_close(first[name][key], value, msg=name)


def train_in_parts() -> None:
    train(DDPStrategy(static_graph=True), OnePassEach)


def test_two_optimizers_with_a_pass_each_are_refused():
    for outcome in outcomes_of_ranks(train_in_parts):
        assert "several optimizers under manual optimization that have a backward pass each" in outcome.error
        assert "Omit `static_graph=True`" in outcome.error

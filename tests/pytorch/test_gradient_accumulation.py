"""Gradient accumulation with ``ddp_ext``: one exchange per window, in its last micro-batch.

Torch's profiler counts the all-reduces that DDP's reducer starts.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.nn import functional

from tests.support.models import MLP, ManualMLP, assert_same_bits, dataset, fit, loader, make_trainer, state_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

# Two ranks, 64 samples, batches of four: eight micro-batches per rank and epoch.


class CountExchanges(pl.Callback):
    """A callback that records the number of all-reduces of gradients in each micro-batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profiler.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.profiler.__exit__(None, None, None)
        # Events of the calls: gloo's events are from its threads, and may be late.
        names = ("c10d::allreduce_", "shm:all_reduce")
        self.counts.append(sum(event.name in names for event in self.profiler.events()))


def count_exchanges(make_kwargs: Callable[[], dict[str, Any]]) -> tuple[list[int], dict, dict]:
    """Trains on one rank; returns the exchanges per micro-batch, and the weights with both strategies."""
    count = CountExchanges()
    kwargs = make_kwargs()
    _, ext = fit("ddp_ext", **{**kwargs, "callbacks": [count, *kwargs.get("callbacks", [])]})
    _, stock = fit("ddp", **make_kwargs())
    return count.counts, state_of(ext), state_of(stock)


def no_accumulation() -> dict[str, Any]:
    return {"max_epochs": 1}


def fixed_windows() -> dict[str, Any]:
    return {"accumulate_grad_batches": 4, "max_epochs": 1}


def shortened_last_window() -> dict[str, Any]:
    return {"accumulate_grad_batches": 3, "max_epochs": 1}


def scheduled() -> dict[str, Any]:
    return {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 4, 2: 1})], "max_epochs": 3}


def limited_epoch() -> dict[str, Any]:
    return {"accumulate_grad_batches": 4, "limit_train_batches": 6, "max_epochs": 1}


@pytest.mark.parametrize(
    ("make_kwargs", "expected"),
    [
        (no_accumulation, [1] * 8),
        (fixed_windows, [0, 0, 0, 1] * 2),
        (shortened_last_window, [0, 0, 1, 0, 0, 1, 0, 1]),
        (scheduled, [0, 1] * 4 + [0, 0, 0, 1] * 2 + [1] * 8),
        (limited_epoch, [0, 0, 0, 1, 0, 1]),
    ],
)
def test_only_the_last_micro_batch_of_a_window_exchanges(make_kwargs, expected):
    for counts, ext, stock in run_ranks(count_exchanges, make_kwargs):
        assert counts == expected
        assert_same_bits(ext, stock)


def validate_inside_windows(strategy: str) -> tuple[list[int], int, dict]:
    pl.seed_everything(11, verbose=False)
    count, validated, model = CountExchanges(), [], MLP()

    class Validated(pl.Callback):
        def on_validation_end(self, trainer, module):
            validated.append(trainer.global_step)

    trainer = make_trainer(
        strategy, accumulate_grad_batches=4, val_check_interval=2, max_epochs=1, callbacks=[count, Validated()]
    )
    trainer.fit(model, loader(), loader())
    return count.counts, len(validated), state_of(model)


def test_validation_inside_a_window_does_not_end_it():
    for (counts, validations, ext), (_, _, stock) in zip(
        run_ranks(validate_inside_windows, "ddp_ext"), run_ranks(validate_inside_windows, "ddp"), strict=True
    ):
        assert counts == [0, 0, 0, 1] * 2
        assert validations == 4
        assert_same_bits(ext, stock)


class SaveAfter(pl.Callback):
    def __init__(self, num_batches: int, path: str) -> None:
        self.num_batches = num_batches
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.num_batches:
            trainer.save_checkpoint(self.path)


def resume_inside_a_window(strategy: str, path: str) -> tuple[list[int], dict]:
    kwargs = {"accumulate_grad_batches": 4, "max_epochs": 1}
    fit(strategy, callbacks=[SaveAfter(2, path)], **kwargs)
    count, model = CountExchanges(), MLP()
    make_trainer(strategy, callbacks=[count], **kwargs).fit(model, loader(), ckpt_path=path)
    return count.counts, state_of(model)


def test_resuming_inside_a_window_ends_it_where_it_would_have_ended(tmp_path):
    ext = run_ranks(resume_inside_a_window, "ddp_ext", str(tmp_path / "ext.ckpt"))
    stock = run_ranks(resume_inside_a_window, "ddp", str(tmp_path / "stock.ckpt"))
    for (counts, ext_state), (stock_counts, stock_state) in zip(ext, stock, strict=True):
        assert counts == stock_counts
        assert sum(counts) == 2
        assert counts[-1] == 1
        assert_same_bits(ext_state, stock_state)


class ManualAccumulation(ManualMLP):
    """A model with an optimizer per half, which exchanges gradients in every second micro-batch only."""

    def training_step(self, batch, batch_idx):
        is_last = batch_idx % 2 == 1
        for optimizer in self.optimizers():
            with optimizer.toggle_model(sync_grad=is_last):
                self.manual_backward(self.loss(batch))
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[index].parameters(), lr=0.1) for index in (0, 2)]


def accumulate_by_hand() -> tuple[list[int], dict, dict]:
    count = CountExchanges()
    variant = "_find_unused_parameters_true"
    _, ext = fit(f"ddp_ext{variant}", ManualAccumulation, callbacks=[count], max_epochs=1)
    _, stock = fit(f"ddp{variant}", ManualAccumulation, max_epochs=1)
    return count.counts, state_of(ext), state_of(stock)


def test_manual_optimization_exchanges_where_the_user_requests_it():
    for counts, ext, stock in run_ranks(accumulate_by_hand):
        assert counts[::2] == [0] * 4
        assert len(set(counts[1::2])) == 1
        assert counts[1] >= 2  # one exchange per optimizer, and one of the bitmap of unused parameters
        assert_same_bits(ext, stock)


class RecordsGradients(pl.Callback):
    """A callback that records the gradients and the batches of each window, before the optimizer step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.batches: list[list[Any]] = [[]]

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches[-1].append(batch)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
        self.batches.append([])


def record_gradients() -> tuple[list[dict], list[list[Any]]]:
    recorder = RecordsGradients()
    fit("ddp_ext", accumulate_grad_batches=3, max_epochs=1, callbacks=[recorder])
    return recorder.gradients, recorder.batches


def test_gradients_are_those_of_the_whole_batch_in_one_process():
    """The test checks the first window, which has the initial weights."""
    (gradients, batches), (other_gradients, other_batches) = run_ranks(record_gradients)
    pl.seed_everything(11, verbose=False)
    model = MLP()
    window = [*batches[0], *other_batches[0]]
    assert len(window) == 6
    features, labels = (torch.cat(parts) for parts in zip(*window, strict=True))
    functional.cross_entropy(model.net(features), labels).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[0][name], parameter.grad)
        assert torch.equal(gradients[0][name], other_gradients[0][name])
    assert len(dataset()) == 64

"""Steps in which ranks have no loss, or a loss that is not finite: the reactions of ``ChecksOptions``.

The reference trains in one process, on the batches of the ranks that have a loss.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from lightning_strategies_ext import ChecksOptions, DDPSpawnStrategy, DDPStrategy, HorovodStrategy, NonfiniteLossError
from tests.support.horovod_ranks import run_horovod
from tests.support.models import (
    MLP,
    NUM_CLASSES,
    NUM_FEATURES,
    assert_close,
    assert_same_bits,
    loader,
    make_trainer,
    state_of,
)
from tests.support.ranks import run_ranks

NUM_BATCHES = 9
#: Batches in which a rank has no loss, by rank. No rank has one in batch 5. Rank 1 has none in batches 6 to 8, one of
#: the windows if three batches are accumulated.
MISSING = {0: {0, 5}, 1: {2, 3, 5, 6, 7, 8}, 2: {3, 5, 7}}
Way = Literal["None", "constant", "nan"]


def batches_of(rank: int, world_size: int, *, is_streamed: bool = False) -> Any:
    num_samples = NUM_BATCHES * 4 * world_size
    batches = loader(num_samples, sampler=range(rank, num_samples, world_size))
    return DataLoader(Stream(batches), batch_size=None) if is_streamed else batches


class Stream(IterableDataset):
    """Batches without a known number."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Missing(MLP):
    """Has no loss in some batches, and gradients that are exchanged together and alone."""

    def __init__(self, way: Way, is_streamed: bool = False) -> None:
        super().__init__()
        self.way = way
        self.is_streamed = is_streamed

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(NUM_FEATURES, 2048), nn.ReLU(), nn.Linear(2048, NUM_CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        if batch_idx not in MISSING[self.global_rank]:
            return loss
        if self.way == "nan":
            return loss * torch.nan
        return None if self.way == "None" else torch.zeros((), requires_grad=True)

    def train_dataloader(self) -> Any:
        return batches_of(self.global_rank, self.trainer.world_size, is_streamed=self.is_streamed)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


def new_model(way: Way = "None", is_streamed: bool = False) -> Missing:
    pl.seed_everything(3, verbose=False)
    return Missing(way, is_streamed)


def checks_for(way: Way) -> ChecksOptions:
    return ChecksOptions(nonfinite_loss="skip") if way == "nan" else ChecksOptions(missing_loss="skip")


def train(
    new_strategy: Callable[..., Any], way: Way, accumulate: int, devices: int = 2, is_streamed: bool = False
) -> tuple[Any, int, float]:
    """Returns the weights, the number of optimizer steps, and the learning rate."""
    model = new_model(way, is_streamed)
    options = {"max_epochs": 1, "accumulate_grad_batches": accumulate, "use_distributed_sampler": False}
    trainer = make_trainer(new_strategy(checks=checks_for(way)), devices, **options)
    trainer.fit(model)
    return state_of(model), trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]


def reference(world_size: int, accumulate: int) -> tuple[Any, int, float]:
    """Trains in one process, on the gradients of the ranks that have a loss in a window."""
    model = new_model()
    [optimizer], [scheduler] = model.configure_optimizers()
    batches = [[*batches_of(rank, world_size)] for rank in range(world_size)]
    for window in range(NUM_BATCHES // accumulate):
        optimizer.zero_grad()
        of_ranks = []
        for rank in range(world_size):
            losses = [
                model.loss(batches[rank][index]) / accumulate
                for index in range(window * accumulate, (window + 1) * accumulate)
                if index not in MISSING[rank]
            ]
            of_ranks += [sum(losses)] if losses else []
        if of_ranks:
            (sum(of_ranks) / len(of_ranks)).backward()
            optimizer.step()
        scheduler["scheduler"].step()
    return state_of(model), NUM_BATCHES // accumulate, optimizer.param_groups[0]["lr"]


def assert_as_reference(ranks: list[tuple[Any, int, float]], accumulate: int, world_size: int = 0) -> None:
    weights, num_steps, rate = reference(world_size or len(ranks), accumulate)
    for own, own_num_steps, own_rate in ranks:
        assert (own_num_steps, own_rate) == (num_steps, rate)
        assert_close(own, weights)
        assert all(torch.equal(own[name], ranks[0][0][name]) for name in own)


def train_ddp(
    world_size: int, accumulate: int, way: Way, arguments: dict[str, Any], is_streamed: bool
) -> tuple[Any, int, float]:
    return train(lambda **checks: DDPStrategy(**arguments, **checks), way, accumulate, world_size, is_streamed)


OVER_GLOO = {"process_group_backend": "gloo"}
CASES = {
    "shm": (2, 1, "None", {}, False),
    "shm, 3 ranks, accumulated": (3, 3, "constant", {}, False),
    "shm, reducer, accumulated": (2, 3, "nan", {"bucket_cap_mb": 1}, False),
    "gloo, accumulated": (2, 3, "None", OVER_GLOO, False),
    "gloo, 3 ranks": (3, 1, "nan", OVER_GLOO, False),
    "stream, accumulated": (2, 3, "None", {}, True),
    "stream, stop": (2, 1, "None", {"uneven_inputs": "stop"}, True),
    "one rank, accumulated": (1, 3, "None", {}, False),
}


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_averaged_over_the_ranks_that_have_a_loss(case: str):
    world_size, accumulate, *_ = CASES[case]
    assert_as_reference(run_ranks(train_ddp, *CASES[case], world_size=world_size), accumulate)


@pytest.mark.processes
def test_spawned_workers_train_with_missing_losses():
    assert_as_reference([train(DDPSpawnStrategy, "None", 1)], 1, world_size=2)


class Records(Missing):
    """Has running statistics and a parameter for odd batches; records the gradients that hooks see."""

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.norm = nn.BatchNorm1d(NUM_CLASSES)
        self.gain = nn.Parameter(torch.ones(()))
        self.after_backward: dict[int, Tensor] = {}
        self.before_step: dict[int, tuple[Tensor | None, Tensor | None]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        features, labels = batch
        is_missing = batch_idx in MISSING[self.global_rank]
        outputs = self.norm(self.net(features * torch.nan if is_missing and self.way == "nan" else features))
        if is_missing and self.way != "nan":
            return None if self.way == "None" else torch.zeros((), requires_grad=True)
        return functional.cross_entropy(outputs * self.gain if batch_idx % 2 else outputs, labels)

    def on_after_backward(self) -> None:
        self.after_backward[self.trainer.fit_loop.batch_idx] = self.net[0].weight.grad.clone()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = self.net[0].weight.grad, self.gain.grad
        self.before_step[self.trainer.fit_loop.batch_idx] = tuple(
            each if each is None else each.clone() for each in gradients
        )


def record(way: Way) -> tuple[Any, Any, Any]:
    model = Records(way)
    strategy = DDPStrategy(find_unused_parameters=True, checks=checks_for(way))
    make_trainer(strategy, max_epochs=1, use_distributed_sampler=False, gradient_clip_val=0.1).fit(model)
    return model.after_backward, model.before_step, state_of(model)


@pytest.mark.processes
@pytest.mark.parametrize("way", ["constant", "nan"])
def test_hooks_see_averaged_gradients_and_buffers_stay_finite(way: Way):
    ranks = run_ranks(record, way)
    for rank, (after_backward, before_step, state) in enumerate(ranks):
        assert {*after_backward} == {*range(NUM_BATCHES)} - MISSING[rank]
        for index, (gradient, of_gain) in before_step.items():
            assert (gradient is None) == (index == 5)
            assert (of_gain is None) == (index == 5 or index % 2 == 0)
            other = ranks[1 - rank][1][index][0]
            assert gradient is None or torch.equal(gradient, other)
            assert index not in after_backward or torch.equal(gradient, after_backward[index])
        assert all(each.isfinite().all() for each in state.values())
        assert all(
            torch.equal(each, ranks[0][2][name])
            for name, each in state.items()
            if not name.startswith(("norm.r", "norm.num"))
        )


class FailsIn(MLP):
    """Divides zero by zero in batch 4 on rank 1, in a module of its own, with dropout and collectives before."""

    def __init__(self, is_found: bool = True) -> None:
        super().__init__()
        self.is_found = is_found
        self.scale = Scale()
        self.register_buffer("count", torch.zeros(()))
        self.ends: list[tuple[int, float, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = functional.dropout(self.net(batch[0]), 0.1)
        self.all_gather(hidden.detach())
        if dist.is_initialized():
            dist.all_reduce(hidden.detach().clone())
        self.log("mean", hidden.mean(), sync_dist=True)
        is_bad = self.global_rank == 1 and batch_idx == 4
        loss = functional.cross_entropy(self.scale(hidden, 0.0 if is_bad and self.is_found else 1.0), batch[1])
        self.count += 1
        self.ends.append((batch_idx, self.count.item(), torch.get_rng_state()))
        return loss * torch.inf if is_bad and not self.is_found else loss


class Scale(nn.Module):
    def forward(self, hidden: Tensor, factor: float) -> Tensor:
        return hidden * factor / factor


def fail(new_strategy: Callable[..., Any], is_found: bool, accumulate: int) -> tuple[str, int]:
    trainer = make_trainer(
        new_strategy(checks=ChecksOptions(nonfinite_loss="error")), accumulate_grad_batches=accumulate, max_epochs=1
    )
    model = FailsIn(is_found)
    with pytest.raises(NonfiniteLossError) as caught:
        trainer.fit(model, loader(72))
    if model.global_rank == 1:  # has run the batch twice, with the same random numbers, and restored the buffer
        batches, counts, random_states = zip(*model.ends, strict=True)
        assert batches == (*range(5), 4, 5)[: len(batches)]
        assert torch.equal(random_states[4], random_states[5])
        assert (model.count, counts[5:]) == (5 if accumulate == 1 else 6, (6.0,) if accumulate == 1 else (6.0, 6.0))
    return str(caught.value), trainer.fit_loop.batch_idx


def fail_in_ddp(arguments: dict[str, Any], is_found: bool, accumulate: int) -> tuple[str, int]:
    return fail(lambda **checks: DDPStrategy(**arguments, **checks), is_found, accumulate)


FOUND = (
    "The loss of rank 1 in batch 4 of epoch 0 is nan. The first module with an output that is not finite is `scale`"
    " (Scale). Check the data, lower the learning rate, or clip gradients. With"
    " `checks=ChecksOptions(nonfinite_loss='skip')`, the strategy leaves such losses out."
)


@pytest.mark.processes
@pytest.mark.parametrize(("arguments", "accumulate"), [({}, 1), ({"process_group_backend": "gloo"}, 3)])
def test_all_ranks_raise_an_error_that_names_rank_batch_and_module(arguments: dict[str, Any], accumulate: int):
    assert run_ranks(fail_in_ddp, arguments, True, accumulate) == [(FOUND, 4 if accumulate == 1 else 5)] * 2


@pytest.mark.processes
def test_a_loss_that_no_module_has_computed_is_reported_as_such():
    [text, _], _ = run_ranks(fail_in_ddp, {}, False, 1)
    assert "is inf. The outputs of all modules are finite when the batch is run again" in text


class MissesOne(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if (self.global_rank, batch_idx) == (1, 2) else super().training_step(batch, batch_idx)


def miss() -> str:
    with pytest.raises(RuntimeError) as caught:
        make_trainer("ddp_ext").fit(MissesOne(), loader())
    return str(caught.value)


@pytest.mark.processes
def test_by_default_a_missing_loss_is_an_error_that_names_rank_and_batch():
    for text in run_ranks(miss):
        assert "`training_step` returned None on rank 1 in batch 2 of epoch 0, so this rank has no loss" in text


def train_horovod() -> tuple[Any, list[tuple[Any, int, float]]]:
    trained = [train(HorovodStrategy, way, accumulate) for way, accumulate in OVER_HOROVOD]
    return fail(HorovodStrategy, True, 1), trained


OVER_HOROVOD = (("None", 3), ("nan", 1), ("constant", 1))


@pytest.mark.processes
def test_ranks_of_horovod_train_with_missing_losses():
    errors, trained = zip(*run_horovod("python", train_horovod), strict=True)
    assert errors == ((FOUND, 4),) * 2
    for (_, accumulate), ranks in zip(OVER_HOROVOD, zip(*trained, strict=True), strict=True):
        assert_as_reference(ranks, accumulate)


def combine() -> list[Any]:
    results = []
    for arguments in ({"compression": "powersgd"}, {"compression": "topk"}, {"bucket_cap_mb": "auto"}):
        model = new_model("nan")
        strategy = DDPStrategy(checks=ChecksOptions(missing_loss="skip", nonfinite_loss="skip"), **arguments)
        make_trainer(strategy, max_epochs=2, use_distributed_sampler=False).fit(model)
        results.append(state_of(model))
    return results


@pytest.mark.processes
def test_compressed_exchanges_and_bucket_searches_keep_weights_equal():
    for own, other in zip(*run_ranks(combine), strict=True):
        assert all(torch.equal(each, other[name]) and each.isfinite().all() for name, each in own.items())


def scale() -> tuple[float, Any]:
    """Trains with a gradient scaler, whose scale overflows at first."""
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2))
    model = new_model()
    strategy = DDPStrategy(precision_plugin=precision, checks=checks_for("None"))
    make_trainer(strategy, max_epochs=3, use_distributed_sampler=False).fit(model)
    return precision.scaler.get_scale(), state_of(model)


@pytest.mark.processes
def test_gradient_scalers_of_all_ranks_stay_equal():
    (factor, weights), (other_factor, other_weights) = run_ranks(scale)
    assert factor == other_factor != 2.0**17
    assert all(torch.equal(each, other_weights[name]) and each.isfinite().all() for name, each in weights.items())


@pytest.mark.forked
def test_one_rank_may_return_none_as_with_lightning():
    def weights(strategy: Any) -> Any:
        model = new_model()
        make_trainer(strategy, devices=1, max_epochs=1, use_distributed_sampler=False).fit(model)
        return state_of(model)

    for options in ({"nonfinite_loss": "error"}, {"nonfinite_loss": "skip"}, {"missing_loss": "skip"}):
        assert_same_bits(weights(DDPStrategy(checks=ChecksOptions(**options))), weights("auto"))

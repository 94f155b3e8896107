"""``ChecksOptions(check_collectives=True)``: ranks that call different collectives raise an error with both calls."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lightning_strategies_ext import ChecksOptions, DDPStrategy, HorovodStrategy, RankDisagreementError
from tests.support.horovod_ranks import try_horovod
from tests.support.models import MLP, assert_same_bits, loader, make_trainer, state_of
from tests.support.ranks import outcomes_of_ranks, run_ranks

CHECKED = ChecksOptions(check_collectives=True)


class Differs(MLP):
    """A model whose rank 1 calls a different collective than rank 0 in the third batch."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.automatic_optimization = fault != "backward"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        strategy, is_faulty = self.trainer.strategy, batch_idx == 2 and self.global_rank == 1
        if self.fault == "shape":
            strategy.reduce(torch.ones(3 if is_faulty else 2))
        elif self.fault == "kind":
            strategy.barrier("a name") if is_faulty else self.all_gather(torch.ones(2))
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        if self.fault == "backward" and not is_faulty:
            self.manual_backward(loss)
        return loss


def over(backend: str, checks: ChecksOptions | None = CHECKED) -> Any:
    return DDPStrategy(process_group_backend=backend, checks=checks)


def horovod() -> Any:
    return HorovodStrategy(checks=CHECKED)


def train(make_strategy: Callable[[], Any], fault: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    model = Differs(fault)
    make_trainer(make_strategy(), max_epochs=1).fit(model, loader(32), loader(16))
    return state_of(model)


def train_with_and_without() -> list[Any]:
    return [train(partial(over, "gloo", checks)) for checks in (CHECKED, None)]


@pytest.mark.processes
def test_weights_are_those_without_the_option() -> None:
    for checked, unchecked in run_ranks(train_with_and_without):
        assert_same_bits(checked, unchecked)


EXPECTED = {
    "shape": (
        "rank 0 calls reduce (mean) of a tensor of shape [2] and dtype float32, at `reduce` in training_step (",
        "rank 1 calls reduce (mean) of a tensor of shape [3] and dtype float32, at `reduce` in training_step (",
    ),
    "kind": (
        "rank 0 calls all_gather of a tensor of shape [2] and dtype float32, at `all_gather` in training_step (",
        "rank 1 calls barrier, at `barrier` in training_step (",
    ),
    "backward": (
        "rank 0 calls exchange of the gradients of batch 2",
        "rank 1 calls exchange of the gradients of batch 3",
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("fault", [*EXPECTED])
def test_every_rank_raises_an_error_with_both_calls(fault: str, backend: str) -> None:
    for outcome in outcomes_of_ranks(train, partial(over, backend), fault):
        assert "RankDisagreementError: The ranks do not call the same collectives: " in outcome.error, outcome
        for text in EXPECTED[fault]:
            assert text in outcome.error


def error_over_horovod() -> str:
    with pytest.raises(RankDisagreementError) as caught:
        train(horovod, "backward")
    return str(caught.value)


@pytest.mark.processes
def test_every_rank_of_horovod_raises_the_error() -> None:
    _, outcomes = try_horovod("horovodrun", error_over_horovod)
    for message in outcomes.values():
        for text in EXPECTED["backward"]:
            assert text in message


def test_the_option_must_be_a_flag() -> None:
    with pytest.raises(TypeError, match="`check_collectives` must be True or False, got 'yes'"):
        ChecksOptions(check_collectives="yes")

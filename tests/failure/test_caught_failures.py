"""Failures of all ranks, or before the first step, and the next failure after a caught one."""

import os
import signal
import threading

import pytest
import torch

from lightning_strategies_ext import DDPStrategy
from lightning_strategies_ext.failure import policies, process_exit
from tests.failure.test_failures import Fail
from tests.support.models import MLP, assert_same_bits, loader, make_trainer, state_of
from tests.support.ranks import outcomes_of_ranks, run_ranks

pytestmark = pytest.mark.processes


def fit_again_after_a_caught_failure(with_same_trainer: bool) -> dict[str, torch.Tensor]:
    trainer = make_trainer("ddp_ext", callbacks=[Fail(0, 1)])
    with pytest.raises(KeyError, match="bad sample"):
        trainer.fit(MLP(), loader())
    if not with_same_trainer:
        trainer = make_trainer("ddp_ext")
    model = MLP()
    trainer.fit(model, loader())
    assert trainer.state.finished
    return state_of(model)


@pytest.mark.parametrize("with_same_trainer", [True, False])
def test_a_failure_of_all_ranks_that_the_script_catches_terminates_no_rank(with_same_trainer):
    assert_same_bits(*run_ranks(fit_again_after_a_caught_failure, with_same_trainer))


def fail_again_after_a_caught_failure(with_same_trainer: bool) -> None:
    policies.GRACE_S = 1.0
    trainer = make_trainer("ddp_ext", callbacks=[Fail(0, 1)])
    with pytest.raises(KeyError, match="bad sample"):
        trainer.fit(MLP(), loader())
    if not with_same_trainer:
        trainer = make_trainer("ddp_ext")
    trainer.callbacks.append(Fail(1, others_are_stuck=True))
    trainer.fit(MLP(), loader())


@pytest.mark.parametrize("with_same_trainer", [True, False])
def test_after_a_caught_failure_the_next_failure_is_detected(with_same_trainer):
    first, second = outcomes_of_ranks(fail_again_after_a_caught_failure, with_same_trainer)
    assert (first.exit_code, second.exit_code) == (process_exit.MONITOR_EXIT_CODE, 1), f"{first}\n{second}"


class FailsEarly(MLP):
    """A model that raises in a hook before the strategy's setup, on some ranks."""

    def __init__(self, hook: str, *failing: int) -> None:
        super().__init__()
        self.failing = failing
        setattr(self, hook, self.fail)

    def fail(self, stage: str | None = None) -> None:
        if int(os.environ["LOCAL_RANK"]) in self.failing:
            raise KeyError("no data")


class CountTeardowns(DDPStrategy):
    num_teardowns = 0

    def teardown(self) -> None:
        super().teardown()
        self.num_teardowns += 1


def fail_early(hook: str, *failing: int) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    strategy = CountTeardowns()
    try:
        make_trainer(strategy).fit(FailsEarly(hook, *failing), loader())
    finally:
        assert strategy.num_teardowns == 1
        strategy.teardown()
        assert signal.getsignal(signal.SIGTERM) is handler
        assert "lightning-strategies-ext store" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("hook", "failing"), [("prepare_data", (0,)), ("setup", (1,)), ("setup", (0, 1)), ("configure_optimizers", (0,))]
)
def test_an_exception_before_the_first_step_ends_all_ranks_and_tears_down(hook, failing):
    outcomes = outcomes_of_ranks(fail_early, hook, *failing)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1], f"{outcomes[0]}\n{outcomes[1]}"
    assert all("AssertionError" not in outcome.error for outcome in outcomes)
    assert all("KeyError: 'no data'" in outcomes[rank].error for rank in failing)

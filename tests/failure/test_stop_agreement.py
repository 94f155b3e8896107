"""Stop agreements: the decision from all votes, and a rank that exits during an agreement."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_strategies_ext.failure.rank_status import StopDecision, StopVote
from lightning_strategies_ext.failure.stop_agreement import POINT, StopAgreement, decide_last_step
from tests.support.models import fit
from tests.support.ranks import outcomes_of_ranks

FIRST, SECOND = (1, 0), (1, 1)
TRAINS = StopVote(FIRST)


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([], None),
        ([TRAINS, TRAINS, None], None),
        ([TRAINS, StopVote(FIRST, True), TRAINS], StopDecision(FIRST)),
        ([StopVote(FIRST, True, (3, 0)), TRAINS, StopVote(FIRST, True, (5, 0))], StopDecision(FIRST)),
        ([StopVote(FIRST, True, (3, 0)), StopVote(FIRST, True, (5, 0))], StopDecision(FIRST, (5, 0))),
        ([StopVote(FIRST, True, (3, 7)), StopVote(FIRST, True, (3, 12))], StopDecision(FIRST, (3, 12))),
        # A rank that has not started votes as soon as it starts.
        ([StopVote(FIRST, True, (3, 0)), None], StopDecision(FIRST)),
        ([StopVote(SECOND, True, (3, 0)), StopVote(FIRST, False, (9, 0), True)], StopDecision(SECOND)),
        # A request after the last step of a rank stops the other ranks after as many steps.
        ([TRAINS, StopVote(FIRST, True, (5, 0), True)], StopDecision(FIRST)),
        ([StopVote(FIRST, True, (3, 0)), StopVote(FIRST, True, (5, 0), True)], StopDecision(FIRST, (5, 0))),
        # A rank in a later agreement does not delay ranks that have not stopped yet.
        ([StopVote(FIRST, True, (3, 0)), StopVote(SECOND)], StopDecision(FIRST, (3, 0))),
        ([StopVote(FIRST, True, (5, 0), True), StopVote(FIRST, True, (5, 0), True)], None),
    ],
)
def test_the_highest_step_is_the_last_once_all_ranks_have_voted(votes, expected):
    assert decide_last_step(dict(enumerate(votes)), None) == expected


def test_a_decision_stands_until_all_ranks_have_stopped():
    before = StopDecision(FIRST, (5, 0))
    one_continues = {0: StopVote(FIRST, True, (5, 0), True), 1: StopVote(FIRST, True, (3, 0))}
    assert decide_last_step({**one_continues, 0: StopVote(SECOND)}, before) == before
    assert decide_last_step(
        {0: StopVote(SECOND, True, (0, 0)), 1: StopVote(SECOND, True, (2, 0))}, before
    ) == StopDecision(SECOND, (2, 0))
    assert decide_last_step({0: StopVote(SECOND), 1: StopVote(SECOND)}, before) is None


def agreement_at(*steps: str) -> StopAgreement:
    """Returns the agreement of a rank that has started and passed some steps and points."""
    agreement = StopAgreement(FIRST, notify=lambda: None)
    for step in steps:
        assert not getattr(agreement, f"must_stop_{step}")()
    return agreement


TRAIN, EVALUATION, AT_POINT = "before_train_step", "before_evaluation_step", "at_point"


def test_points_have_equal_numbers_for_any_number_of_evaluation_steps():
    assert agreement_at(TRAIN, AT_POINT, EVALUATION).position == (1, POINT + 1)
    for num_steps in (0, 1, 5):
        assert agreement_at(TRAIN, AT_POINT, *[EVALUATION] * num_steps, AT_POINT).position == (1, 2 * POINT)
    assert agreement_at(TRAIN, AT_POINT, TRAIN).position == (2, 0)


def test_a_request_of_the_training_thread_is_a_vote_for_its_last_point():
    agreement = agreement_at(TRAIN, AT_POINT)
    agreement.request_here()
    assert agreement.vote() == StopVote(FIRST, True, (1, POINT))
    agreement.receive(StopDecision(FIRST, (1, POINT)))
    assert agreement.must_stop_at_point()
    assert agreement.must_stop_before_train_step()
    later = agreement_at(TRAIN)
    later.request_here()
    later.receive(StopDecision(FIRST, (2, 0)))  # another rank has started the second step
    assert not later.must_stop_at_point()
    assert not later.must_stop_before_train_step()
    assert later.must_stop_at_point()


@pytest.mark.parametrize(("last_step", "must_stop"), [((1, 0), True), ((1, POINT), False)])
def test_a_rank_that_has_recorded_a_point_may_still_stop_there(last_step, must_stop):
    agreement = agreement_at(TRAIN)
    agreement.position = 1, POINT
    agreement.receive(StopDecision(FIRST))
    assert agreement.is_agreeing
    agreement.receive(StopDecision(FIRST, last_step))
    assert agreement.must_stop_at_point(is_recorded=True) == must_stop
    assert agreement.position == (1, POINT)


LAST = 2


class ExitDuringAgreement(Callback):
    """After five steps, rank 1 receives a SIGTERM. Rank 2 is stopped and does not vote until it is killed."""

    def __init__(self, directory: Path) -> None:
        self.pid = directory / "pid"

    def setup(self, trainer, pl_module, stage):
        if trainer.global_rank == LAST:
            self.pid.write_text(str(os.getpid()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step != 5:
            return
        if trainer.global_rank == LAST:
            os.kill(os.getpid(), signal.SIGSTOP)
        last = psutil.Process(int(self.pid.read_text()))
        while last.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(2.0, last.kill).start()  # while the other ranks wait for its vote
        time.sleep(0.5)


def train(directory: Path) -> None:
    fit("ddp_ext", devices=3, max_epochs=-1, callbacks=[ExitDuringAgreement(directory)])


@pytest.mark.processes
def test_a_rank_that_exits_during_a_stop_agreement_is_named_and_all_ranks_fail(tmp_path: Path):
    outcomes = outcomes_of_ranks(train, tmp_path, world_size=3)
    assert outcomes[LAST].exit_code == -signal.SIGKILL
    for outcome in outcomes[:LAST]:
        assert outcome.error is not None, outcome
        assert f"RankFailedError: rank {LAST} on" in outcome.error, outcome
        assert outcome.exit_code != 0, outcome

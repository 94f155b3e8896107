"""What ranks agree on, from what all say: no process is needed to try it."""

import dataclasses
import json

import pytest

from lightning_strategies_ext.failure.ballots import (
    StageExit,
    StageExits,
    StopDecision,
    StopVote,
    decide_last_step,
    merge_stage_exits,
)
from lightning_strategies_ext.failure.rank_status import RankStatus

FIRST, SECOND = (1, 0), (1, 1)
TRAINS = StopVote(FIRST)


@pytest.mark.parametrize(
    ("ballots", "expected"),
    [
        ([], None),
        ([TRAINS, TRAINS, None], None),
        ([TRAINS, StopVote(FIRST, True), TRAINS], StopDecision(FIRST)),
        ([StopVote(FIRST, True, (3, 0)), TRAINS, StopVote(FIRST, True, (5, 0))], StopDecision(FIRST)),
        ([StopVote(FIRST, True, (3, 0)), StopVote(FIRST, True, (5, 0))], StopDecision(FIRST, (5, 0))),
        ([StopVote(FIRST, True, (3, 7)), StopVote(FIRST, True, (3, 12))], StopDecision(FIRST, (3, 12))),
        # One has begun nothing yet, and says where it is once it has.
        ([StopVote(FIRST, True, (3, 0)), None], StopDecision(FIRST)),
        ([StopVote(SECOND, True, (3, 0)), StopVote(FIRST, False, (9, 0), True)], StopDecision(SECOND)),
        # Who was asked after its last step still has the others stop, after as many as it has made.
        ([TRAINS, StopVote(FIRST, True, (5, 0), True)], StopDecision(FIRST)),
        ([StopVote(FIRST, True, (3, 0)), StopVote(FIRST, True, (5, 0), True)], StopDecision(FIRST, (5, 0))),
        # One that is further does not hold up those that have not stopped yet.
        ([StopVote(FIRST, True, (3, 0)), StopVote(SECOND)], StopDecision(FIRST, (3, 0))),
        ([StopVote(FIRST, True, (5, 0), True), StopVote(FIRST, True, (5, 0), True)], None),
    ],
)
def test_the_highest_step_is_the_last_once_all_have_said_theirs(ballots, expected):
    assert decide_last_step(dict(enumerate(ballots)), None) == expected


def test_what_is_decided_stands_until_all_have_stopped():
    before = StopDecision(FIRST, (5, 0))
    one_goes_on = {0: StopVote(FIRST, True, (5, 0), True), 1: StopVote(FIRST, True, (3, 0))}
    assert decide_last_step({**one_goes_on, 0: StopVote(SECOND)}, before) == before
    assert decide_last_step(
        {0: StopVote(SECOND, True, (0, 0)), 1: StopVote(SECOND, True, (2, 0))}, before
    ) == StopDecision(SECOND, (2, 0))
    assert decide_last_step({0: StopVote(SECOND), 1: StopVote(SECOND)}, before) is None


def test_of_who_has_left_it_is_known_with_how_many_collectives():
    departed = {0: StageExit(2, 7), 1: None, 2: StageExit(2, 5), 3: StageExit(1, 1), 4: StageExit(2, 0, True)}
    assert merge_stage_exits([], departed, 2) == StageExits(2, (0, 2), 5)
    assert merge_stage_exits([None, StageExits(2, (9,), 3), StageExits(1, (8,), 0)], departed, 2) == StageExits(
        2, (0, 2, 9), 3
    )
    assert merge_stage_exits([], departed, 3) is None
    many = merge_stage_exits([], {rank: StageExit(1, rank) for rank in range(1000)}, 1)
    assert many == StageExits(1, tuple(range(8)), 0)


def test_it_is_what_it_was_after_it_was_said():
    sign = RankStatus(
        *(3, 7, "running", 2),
        stop_vote=StopVote(FIRST, True, (3, 4)),
        stop_decision=StopDecision(FIRST, (5, 0)),
        stage_exit=StageExit(2, 7),
        stage_exits=StageExits(2, (0, 2), 5),
    )
    assert RankStatus.load(sign.dump(1 << 14)) == sign
    assert RankStatus.from_dict(
        json.loads(json.dumps(dataclasses.asdict(RankStatus(0, stop_vote=StopVote(FIRST)))))
    ) == RankStatus(0, stop_vote=StopVote(FIRST))

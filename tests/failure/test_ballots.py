"""What ranks agree on, from what all say: no process is needed to try it."""

import dataclasses
import json

import pytest

from lightning_strategies_ext.failure.ballots import Ballot, Decision, Departed, Departures, add_departures, decide
from lightning_strategies_ext.failure.signs import Sign

FIRST, SECOND = (1, 0), (1, 1)
TRAINS = Ballot(FIRST)


@pytest.mark.parametrize(
    ("ballots", "expected"),
    [
        ([], None),
        ([TRAINS, TRAINS, None], None),
        ([TRAINS, Ballot(FIRST, True), TRAINS], Decision(FIRST)),
        ([Ballot(FIRST, True, (3, 0)), TRAINS, Ballot(FIRST, True, (5, 0))], Decision(FIRST)),
        ([Ballot(FIRST, True, (3, 0)), Ballot(FIRST, True, (5, 0))], Decision(FIRST, (5, 0))),
        ([Ballot(FIRST, True, (3, 7)), Ballot(FIRST, True, (3, 12))], Decision(FIRST, (3, 12))),
        # One has begun nothing yet, and says where it is once it has.
        ([Ballot(FIRST, True, (3, 0)), None], Decision(FIRST)),
        ([Ballot(SECOND, True, (3, 0)), Ballot(FIRST, False, (9, 0), True)], Decision(SECOND)),
        # Who was asked after its last step still has the others stop, after as many as it has made.
        ([TRAINS, Ballot(FIRST, True, (5, 0), True)], Decision(FIRST)),
        ([Ballot(FIRST, True, (3, 0)), Ballot(FIRST, True, (5, 0), True)], Decision(FIRST, (5, 0))),
        # One that is further does not hold up those that have not stopped yet.
        ([Ballot(FIRST, True, (3, 0)), Ballot(SECOND)], Decision(FIRST, (3, 0))),
        ([Ballot(FIRST, True, (5, 0), True), Ballot(FIRST, True, (5, 0), True)], None),
    ],
)
def test_the_highest_step_is_the_last_once_all_have_said_theirs(ballots, expected):
    assert decide(dict(enumerate(ballots)), None) == expected


def test_what_is_decided_stands_until_all_have_stopped():
    before = Decision(FIRST, (5, 0))
    one_goes_on = {0: Ballot(FIRST, True, (5, 0), True), 1: Ballot(FIRST, True, (3, 0))}
    assert decide({**one_goes_on, 0: Ballot(SECOND)}, before) == before
    assert decide({0: Ballot(SECOND, True, (0, 0)), 1: Ballot(SECOND, True, (2, 0))}, before) == Decision(
        SECOND, (2, 0)
    )
    assert decide({0: Ballot(SECOND), 1: Ballot(SECOND)}, before) is None


def test_of_who_has_left_it_is_known_with_how_many_collectives():
    departed = {0: Departed(2, 7), 1: None, 2: Departed(2, 5), 3: Departed(1, 1), 4: Departed(2, 0, True)}
    assert add_departures([], departed, 2) == Departures(2, (0, 2), 5)
    assert add_departures([None, Departures(2, (9,), 3), Departures(1, (8,), 0)], departed, 2) == Departures(
        2, (0, 2, 9), 3
    )
    assert add_departures([], departed, 3) is None
    many = add_departures([], {rank: Departed(1, rank) for rank in range(1000)}, 1)
    assert many == Departures(1, tuple(range(8)), 0)


def test_it_is_what_it_was_after_it_was_said():
    sign = Sign(
        *(3, 7, "running", 2),
        ballot=Ballot(FIRST, True, (3, 4)),
        decision=Decision(FIRST, (5, 0)),
        departed=Departed(2, 7),
        departures=Departures(2, (0, 2), 5),
    )
    assert Sign.load(sign.dump(1 << 14)) == sign
    assert Sign.of(json.loads(json.dumps(dataclasses.asdict(Sign(0, ballot=Ballot(FIRST)))))) == Sign(
        0, ballot=Ballot(FIRST)
    )

"""Rank statuses, and the hung ranks according to them; these tests start no process."""

import os
import random
import re
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.failure import failure_detector, failure_report
from lightning_strategies_ext.failure.failure_detector import HeartbeatAges, Observation, first_failure, hung_ranks
from lightning_strategies_ext.failure.local_status import LocalStatus
from lightning_strategies_ext.failure.rank_status import (
    CollectiveProgress,
    Failure,
    RankStatus,
    StageExit,
    StageExits,
    StopDecision,
    StopVote,
    format_ranks,
    merge_stage_exits,
)
from lightning_strategies_ext.failure.thread_activity import ThreadActivity

HANG_TIMEOUT_S = 300.0
WAITS = RankStatus(0, stage=1, num_started=7, in_collective_s=301, unchanged_s=301, idle_s=301, collective="all_reduce")
SLEEPS = RankStatus(1, stage=1, num_started=6, unchanged_s=301, idle_s=301)
COMPUTES = replace(SLEEPS, idle_s=0)
MOVES = replace(SLEEPS, unchanged_s=0, idle_s=0)


def stuck(*statuses: RankStatus, ages: dict[int, float] | None = None) -> tuple[int, ...]:
    by_rank = {rank: replace(status, rank=rank) for rank, status in enumerate(statuses)}
    return hung_ranks(by_rank, {**dict.fromkeys(by_rank, 0.0), **(ages or {})}, HANG_TIMEOUT_S)


@pytest.mark.parametrize(
    "waits",
    [
        WAITS,
        replace(WAITS, num_started=0),  # a rank that is known to wait
        replace(WAITS, in_collective_s=0),  # a rank that is ahead and inactive, for example in a backward pass
    ],
)
def test_a_rank_that_sleeps_while_another_rank_waits_is_hung(waits):
    assert stuck(waits, replace(SLEEPS, num_started=min(SLEEPS.num_started, waits.num_started))) == (1,)
    assert stuck(SLEEPS, WAITS, SLEEPS) == (0, 2)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (WAITS, MOVES, "it is active, as in a validation on one rank"),
        (WAITS, COMPUTES, "it computes, or reads, within one call"),
        (WAITS, replace(SLEEPS, is_in_debugger=True), "it is in a debugger"),
        (WAITS, replace(SLEEPS, idle_s=299), "it has not slept for long enough"),
        (replace(WAITS, in_collective_s=299, unchanged_s=299), SLEEPS, "no rank has waited for long enough"),
        (SLEEPS, SLEEPS, "no rank waits: all read from a slow disk, for example"),
        (MOVES, SLEEPS, "no rank waits"),
        (replace(WAITS, state="failed"), SLEEPS, "one rank has failed, which ends all ranks"),
        (
            replace(WAITS, state="exited"),
            replace(SLEEPS, stage=9),
            "one rank has exited, which is detected in a different way",
        ),
        (replace(MOVES, state="finished"), MOVES, "it is still in its stage, and active"),
        (replace(SLEEPS, state="finished"), replace(SLEEPS, state="finished"), "both have finished the stage"),
    ],
)
def test_no_rank_is_hung_if(first, second, reason):
    assert stuck(first, second) == (), reason
    assert stuck(second, first) == (), reason


def test_an_active_rank_keeps_inactive_ranks_from_being_hung():
    assert stuck(WAITS, SLEEPS, MOVES) == ()


def test_an_unresponsive_rank_is_hung_for_any_last_status():
    assert stuck(WAITS, MOVES, ages={1: 301}) == (1,)
    assert stuck(WAITS, MOVES, ages={1: 299}) == ()
    assert stuck(replace(WAITS, in_collective_s=400), MOVES, ages={0: 301}) == ()  # then, no rank waits


def test_ranks_that_all_wait_for_each_other_are_hung():
    assert stuck(WAITS, replace(WAITS, collective="broadcast")) == (0, 1)


def test_a_rank_that_sleeps_in_a_stage_that_other_ranks_have_finished_is_hung():
    finished = replace(MOVES, state="finished", in_collective_s=301)
    assert stuck(finished, SLEEPS) == (1,)
    assert stuck(replace(MOVES, state="exited"), SLEEPS, ages={0: 301}) == (1,)  # rank 0's process has exited since
    # Rank 1 may have waited for rank 0 before rank 0 finished the stage, and may be about to publish new activity.
    assert stuck(replace(finished, in_collective_s=299), SLEEPS) == ()
    assert stuck(replace(MOVES, state="exited"), SLEEPS, ages={0: 299}) == ()


def test_sleep_between_stages_is_a_hang_once_a_peer_waits_in_the_next_stage():
    finished = replace(SLEEPS, state="finished", in_collective_s=301)
    assert stuck(replace(WAITS, stage=2), finished) == (1,)
    assert stuck(replace(WAITS, stage=2), replace(finished, idle_s=0)) == ()


def test_a_rank_at_the_same_line_in_another_collective_is_active():
    class Counts(CollectiveProgress):
        num = 0

        def num_started(self) -> int:
            return self.num

    progress = Counts()
    local = LocalStatus(dist.HashStore(), 0, {0: Peer.this_process(0)}, progress, lambda: "train")
    thread = threading.Thread(target=threading.Event().wait, daemon=True)  # always at the same stack position
    thread.start()
    local.activity, local.own.state = ThreadActivity(thread), "running"

    def look() -> RankStatus:
        local.sample_training_thread(HANG_TIMEOUT_S)
        local.publish()
        return local.read()[0]

    look()
    assert look().unchanged_s == HANG_TIMEOUT_S
    progress.num = 1
    status = look()
    assert (status.num_started, status.unchanged_s, status.idle_s, status.in_collective_s) == (1, 0, 0, 0)
    assert look().unchanged_s == HANG_TIMEOUT_S
    local.own.state = "finished"
    assert [look().in_collective_s, look().in_collective_s] == [0, HANG_TIMEOUT_S]
    local.close()


def test_heartbeat_ages_count_only_time_in_which_this_process_ran():
    ages = HeartbeatAges()
    ages.update({0: RankStatus(0, heartbeat=1), 1: RankStatus(1, heartbeat=1)}, 0.25)
    ages.update({0: RankStatus(0, heartbeat=2), 1: RankStatus(1, heartbeat=1)}, 0.25)
    ages.update({0: RankStatus(0, heartbeat=3), 1: RankStatus(1, heartbeat=1)}, 0.5)
    assert ages.age_s == {0: 0.0, 1: 0.75}


def test_the_first_failure_is_the_earliest_that_any_rank_knows():
    early = Failure((2,), "host", 10.0, "train", "ValueError: no")
    late = replace(early, ranks=(0,), time=11.0)
    assert first_failure({0: RankStatus(0, failure=late), 1: RankStatus(1, failure=early), 2: RankStatus(2)}) == early
    assert first_failure({0: RankStatus(0)}) is None


@pytest.mark.parametrize("num_lines", [1, 100, 100_000])
def test_an_encoded_status_fits_its_slot(num_lines):
    failure = Failure((1,), "host", 1.5, "train", "ValueError: \N{SNOWMAN}", ("a:1 in f",), "trace\n" * num_lines, 1)
    status = RankStatus(3, 4, "failed", user_frames=("a:1 in f",), stack="line\n" * num_lines, failure=failure)
    content = status.dump(32_000)
    assert len(content) <= 32_000
    back = RankStatus.load(content)
    assert (back.rank, back.state, back.failure.headline, back.failure.ranks) == (3, "failed", failure.headline, (1,))
    if num_lines <= 100:
        assert back == status


def test_no_random_sequence_of_active_ranks_is_a_hang():
    generator = random.Random(5)
    for _ in range(2000):
        kinds = [WAITS, MOVES, COMPUTES, replace(MOVES, state="finished")]
        statuses = generator.choices(kinds, k=generator.randint(2, 5))
        if any(status in (MOVES, COMPUTES) for status in statuses):
            assert stuck(*statuses) == ()


@pytest.mark.parametrize("by", [0, 1])
def test_the_report_has_the_stacks_for_any_rank_that_detected_the_hang(by):
    failure = Failure(
        (1,), "here", 0.0, "train", "rank 0 has waited 2 s", details="Rank 1 is at: sleep", reported_by=by, kind="hang"
    )
    assert "Rank 1 is at: sleep" in failure_report.full_report(failure)
    assert "Rank 1 is at" not in failure_report.full_report(
        replace(failure, reported_by=1, is_self_reported=True, kind="failed")
    )


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0-1"),
        ([0, 2], "ranks 0 and 2"),
        ([5, 0, 2], "ranks 0, 2, and 5"),
        (range(8), "ranks 0-7"),
        (range(512), "ranks 0-7 and 504 more"),
        ([0, 2, 5, *range(100, 1119)], "ranks 0, 2, 5, 100-104, and 1014 more"),
    ],
)
def test_a_list_of_ranks_collapses_ranges_and_names_at_most_eight(ranks: Sequence[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_a_message_counts_ranks_that_are_not_listed() -> None:
    exits = merge_stage_exits([RankStatus(rank, stage_exit=StageExit(1, rank)) for rank in range(1, 64)], 1)
    assert exits is not None
    assert format_ranks(exits.ranks, exits.num_ranks) == "ranks 1-8 and 55 more"
    assert format_ranks([3], 2) == "ranks 3 and 1 more"


def test_a_hang_of_512_ranks_is_reported_in_short_lines() -> None:
    statuses = {rank: WAITS if rank else SLEEPS for rank in range(512)}
    statuses = {rank: replace(status, rank=rank) for rank, status in statuses.items()}
    peers = {rank: Peer(rank, "here", os.getpid(), 0.0) for rank in statuses}
    ages = dict.fromkeys(statuses, 0.0)
    failure = failure_detector.diagnose_hang(Observation(1, peers, statuses, ages), HANG_TIMEOUT_S)
    assert failure is not None
    assert failure.ranks == (0,)
    assert failure.headline.startswith("ranks 1-8 and 503 more waited 300 s for it in ")


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (
            [replace(COMPUTES, user_frames=("train.py:9 in load",)), MOVES],
            "Ranks 1-2 have not joined a .* train.py:9 in",
        ),
        ([WAITS, replace(MOVES, stage_and_step="train, step 3")], "Rank 2 has not joined a .* 2 runs train, step 3\\."),
        ([WAITS, replace(MOVES, num_started=8)], ""),  # it has joined the collective, and may compute since
        ([replace(MOVES, stage=2), replace(MOVES, state="failed")], ""),
    ],
)
def test_after_a_timeout_the_ranks_that_wait_in_no_collective_are_named(others: list[RankStatus], text: str) -> None:
    statuses = {rank: replace(status, rank=rank) for rank, status in enumerate([WAITS, *others])}
    assert re.match(text or "$", failure_report.describe_absent(Observation(0, {}, statuses, {})))


def test_merged_stage_exits_have_the_smallest_number_of_collectives_and_eight_ranks():
    exits = {0: StageExit(2, 7), 1: None, 2: StageExit(2, 5), 3: StageExit(1, 1), 4: StageExit(2, 0, True)}
    statuses = [RankStatus(rank, stage_exit=exit) for rank, exit in exits.items()]
    assert merge_stage_exits(statuses, 2) == StageExits(2, (0, 2), 2, 5)
    known = [StageExits(2, (9,), 70, 3), StageExits(1, (8,), 1, 0)]
    statuses += [RankStatus(rank, stage_exits=exits) for rank, exits in enumerate(known, 5)]
    assert merge_stage_exits(statuses, 2) == StageExits(2, (0, 2, 9), 70, 3)
    assert merge_stage_exits(statuses, 3) is None
    many = merge_stage_exits([RankStatus(rank, stage_exit=StageExit(1, rank)) for rank in range(1000)], 1)
    assert many == StageExits(1, tuple(range(8)), 1000, 0)


def test_a_status_survives_encoding():
    status = RankStatus(
        *(3, 7, "running", 2),
        stop_vote=StopVote((1, 0), True, (3, 4)),
        stop_decision=StopDecision((1, 0), (5, 0)),
        stage_exit=StageExit(2, 7),
        stage_exits=StageExits(2, (0, 2), 2, 5),
    )
    assert RankStatus.load(status.dump(1 << 14)) == status
    without_step = RankStatus(0, stop_vote=StopVote((1, 0)), stop_decision=StopDecision((1, 0)))
    assert RankStatus.load(without_step.dump(1 << 14)) == without_step

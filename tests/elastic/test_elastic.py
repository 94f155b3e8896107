"""Elastic training: ranks that die, leave and join during ``fit``, under ``horovodrun`` with a discovery script.

Each run trains digits for as many epochs as an undisturbed one, counts every sample, and must become as good.
"""

import os

import pytest

from benchmarks.horovod_launch import BIN, FIRST, SECOND, THIRD
from tests.support.elastic_runs import STRATEGY, check_is_as_good_as_undisturbed, run_elastic
from tests.support.elastic_training import NUM_EPOCHS, NUM_TRAINED
from tests.support.hosts import NoHostsError, put_ssh, two_hosts


def test_an_undisturbed_run():
    run = run_elastic(strategy=STRATEGY, again=True)
    check_is_as_good_as_undisturbed(run, within=0.01)
    assert run.worlds == [(2, 0), (2, 0)]  # the last of another `fit`
    assert [line["seen"] for line in run.having("seen")] == [NUM_TRAINED] * (NUM_EPOCHS + 1) * 2
    first, second = run.having("validated")
    assert first["validated"] == second["validated"]


def test_a_rank_that_is_killed_in_the_middle_of_an_epoch():
    run = run_elastic(strategy=STRATEGY, events=[{"do": "kill", "step": 70, "rank": 1}], again=True)
    check_is_as_good_as_undisturbed(run)
    assert run.worlds == [(2, 0), (1, 60), (1, 0)]  # the last of another `fit`
    assert "with 1 ranks, 0 of them new, from the commit at step 60; 10 steps are repeated" in run.output
    assert "2 -> 1 ranks: each keeps its batch size" in run.output
    assert len({line["pid"] for line in run.lines}) == 2  # the survivor is the process it was
    assert run.ends[0]["lr"] == pytest.approx(4e-3 * 0.2)


def test_rank_0_that_is_killed_with_accumulation_and_workers_and_a_policy():
    run = run_elastic(
        strategy={"commit_every_n_steps": 10},
        events=[{"do": "kill", "step": 35, "rank": 0}],
        num_workers=1,
        trainer={"accumulate_grad_batches": 2, "max_epochs": 2 * NUM_EPOCHS},
        policy={"ScaleLearningRate": {}},
    )
    check_is_as_good_as_undisturbed(run, num_epochs=2 * NUM_EPOCHS)
    assert run.worlds == [(2, 0), (1, 30)]
    assert "2 -> 1 ranks: each keeps its batch size, and learning rates are times 0.5" in run.output
    assert run.ends[0]["lr"] == pytest.approx(4e-3 * 0.2 / 2)


def test_a_rank_that_is_added_trains_what_the_other_has_unfrozen():
    events = [{"do": "hosts", "step": 60, "hosts": [FIRST, SECOND]}]
    run = run_elastic(hosts=(FIRST,), strategy=STRATEGY, pause_s=0.03, events=events, unfreezes_at=0)
    check_is_as_good_as_undisturbed(run)
    assert [size for size, _ in run.worlds] == [1, 2]
    assert "with 2 ranks, 1 of them new" in run.output
    assert "; 0 steps are repeated" in run.output


def test_a_rank_that_is_added_and_one_that_is_killed():
    events = [
        {"do": "hosts", "step": 60, "hosts": [FIRST, SECOND, THIRD]},
        {"do": "kill", "step": 90, "rank": 0, "world": 3, "batches": 5},
    ]
    run = run_elastic(strategy=STRATEGY, pause_s=0.1, events=events, policy={"KeepGlobalBatch": {}})
    check_is_as_good_as_undisturbed(run)
    assert [size for size, _ in run.worlds] == [2, 3, 2]
    assert "2 -> 3 ranks: the batch of all ranks keeps its size, and is divided by 3" in run.output
    sizes = {len(line["samples"]) for line in run.having("samples")}
    assert {16, 11} <= sizes  # of 32 samples, 16 for each of two and 11 for each of three
    assert max(sizes) <= 17  # the last of an epoch may have one more


def test_a_host_that_goes_without_a_word_is_missed_and_the_other_goes_on(tmp_path):
    try:
        with two_hosts(tmp_path) as hosts:
            put_ssh(hosts, tmp_path, hears_cable=True)
            run = run_elastic(
                hosts=tuple(host.name for host in hosts),
                arguments=("--gloo-timeout-seconds", "600"),
                enter=tuple(hosts[0].enter()),
                variables={"PATH": os.pathsep.join([str(tmp_path), str(BIN), os.environ["PATH"]])},
                strategy=STRATEGY,
                events=[{"do": "unplug", "step": 70, "rank": 0}],
            )
    except NoHostsError as error:
        pytest.skip(str(error))
    check_is_as_good_as_undisturbed(run)
    assert run.worlds == [(2, 0), (1, 60)]
    assert "does not answer any more" in run.output


def test_a_rank_that_is_killed_during_a_commit():
    run = run_elastic(strategy=STRATEGY, events=[{"do": "kill", "at": "commit", "step": 60, "rank": 1}])
    check_is_as_good_as_undisturbed(run)
    assert run.worlds == [(2, 0), (1, 40)]
    assert "; 20 steps are repeated" in run.output


def test_a_rank_that_is_killed_during_validation():
    events = [{"do": "kill", "at": "validation", "step": 50, "rank": 0}]
    run = run_elastic(strategy=STRATEGY, events=events, is_manual=True)
    check_is_as_good_as_undisturbed(run)
    assert run.worlds == [(2, 0), (1, 80)]
    assert "; 10 steps are repeated" in run.output


def test_a_rank_that_the_others_wait_for_in_vain_is_killed():
    event = {"do": "signal", "signal": "SIGSTOP", "step": 70, "rank": 1}
    run = run_elastic(strategy={**STRATEGY, "patience": 4}, events=[event])
    check_is_as_good_as_undisturbed(run)
    assert run.worlds == [(2, 0), (1, 60)]
    assert "rank 1 is stopped" in run.output
    assert "rank 1 is killed: nobody is waited for in vain." in run.output


def test_too_few_ranks_and_going_on_from_the_checkpoint(tmp_path):
    run = run_elastic(
        min_ranks=2,
        arguments=("--elastic-timeout", "8"),
        keep=tmp_path,
        strategy=STRATEGY,
        events=[{"do": "kill", "step": 70, "rank": 1}],
    )
    assert run.code != 0
    assert "WorldTooSmallError: This rank got a SIGTERM before it was in a new world" in run.output
    (path,) = run.checkpoints
    assert f"ckpt_path='{path}'" in run.output
    assert run.checkpoints[path]["global_step"] == 60
    run = run_elastic(hosts=(SECOND,), keep=tmp_path, strategy=STRATEGY, ckpt_path=path)
    check_is_as_good_as_undisturbed(run, from_disk=True)
    assert run.worlds == [(2, 0), (1, 60)]


def test_a_host_that_is_taken_away():
    events = [{"do": "hosts", "step": 60, "hosts": [FIRST]}]
    run = run_elastic(strategy=STRATEGY, pause_s=0.1, events=events)
    check_is_as_good_as_undisturbed(run)
    assert [size for size, _ in run.worlds] == [2, 1]
    assert "; 0 steps are repeated" in run.output
    assert "This rank ends: its host has been taken away" in run.output


def test_a_host_of_two_ranks_of_which_one_is_killed():
    run = run_elastic(hosts=(f"{FIRST}:2", SECOND), strategy=STRATEGY, events=[{"do": "kill", "step": 50, "rank": 1}])
    check_is_as_good_as_undisturbed(run)
    assert run.worlds == [(3, 0), (1, 40)]
    assert "This rank ends: its host has been taken away, or is blacklisted" in run.output
    assert "WorldTooSmallError" not in run.output
    # A rank saves its state where the driver takes long to find a new world, as on a busy machine, and says so.
    assert bool(run.checkpoints) == ("There is no place for this rank in a new world" in run.output)


@pytest.mark.parametrize(
    ("at", "pause_s", "num_repeated"), [("train", 0.0, 0), ("validation", 0.2, 0), ("validation", 1.8, 5)]
)
def test_a_rank_that_gets_a_sigterm_leaves(at, pause_s, num_repeated):
    event = {"do": "signal", "signal": "SIGTERM", "at": at, "step": 30, "rank": 1}
    run = run_elastic(strategy=STRATEGY, events=[event], validation_pause_s=pause_s)
    check_is_as_good_as_undisturbed(run)
    assert [size for size, _ in run.worlds] == [2, 1]
    assert "This rank leaves after a SIGTERM." in run.output
    assert f"; {num_repeated} steps are repeated" in run.output


def test_a_rank_that_raises():
    run = run_elastic(strategy=STRATEGY, events=[{"do": "raise", "step": 70, "rank": 0}])
    check_is_as_good_as_undisturbed(run)
    assert run.worlds == [(2, 0), (1, 60)]
    assert "ValueError: a bad sample" in run.output

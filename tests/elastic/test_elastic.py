"""Elastic training under ``horovodrun`` with a discovery script: ranks fail, leave, and join during ``fit``.

Each run trains on digits for the number of epochs of an uninterrupted run, counts every sample,
and must be as accurate.
"""

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.horovod_commands import BIN, FIRST, SECOND, THIRD, count_ranks, elastic_horovodrun
from tests.support.elastic_runs import STRATEGY, Run, check_is_as_accurate_as_uninterrupted, run_plan
from tests.support.elastic_script import (
    NUM_EPOCHS,
    NUM_TRAINED,
    Fault,
    Net,
    Plan,
    fail,
    kill,
    once,
    stop,
    terminate,
)
from tests.support.namespace_hosts import NoHostsError, put_ssh, two_hosts, unplug

pytestmark = pytest.mark.processes


def run_elastic(
    *faults: Fault,
    hosts: tuple[str, ...] = (FIRST, SECOND),
    min_ranks: int = 1,
    arguments: tuple[str, ...] = (),
    results_path: Path | None = None,
    enter: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
    **plan: Any,
) -> Run:
    """Runs the script with ``horovodrun`` and a discovery script; ``**plan`` are attributes of the :class:`Plan`.

    Args:
        *faults: Functions that each rank calls.
        hosts: Hosts at the start, with one rank each, or with the number of ranks after a colon.
        min_ranks: The value of ``--min-np``.
        arguments: Further arguments of ``horovodrun``.
        results_path: Directory of the run; a temporary directory if None.
        enter: Prefix of a command that runs on a certain host.
        variables: Variables of the environment.
    """
    with tempfile.TemporaryDirectory() as temporary:
        directory, interface = results_path or Path(temporary), "eth0" if enter else "lo"
        start = *enter, *elastic_horovodrun(directory, hosts, min_ranks, *arguments, interface=interface)
        whole = Plan(count_ranks(hosts), "horovodrun", faults, **plan)
        return run_plan(whole, *start, directory=directory, env=variables)


def change_hosts(net: Net, hosts: tuple[str, ...]) -> None:
    """Writes the hosts that the discovery script prints."""
    (net.directory / "hosts").write_text("".join(f"{host}:1\n" for host in hosts))


def test_a_run_without_failures():
    run = run_elastic(strategy=STRATEGY, again=True)
    check_is_as_accurate_as_uninterrupted(run, within=0.01)
    assert run.worlds == [(2, 0), (2, 0)]  # the last world is that of a second `fit`
    assert [line["seen"] for line in run.having("seen")] == [NUM_TRAINED] * (NUM_EPOCHS + 1) * 2
    first, second = run.having("validated")
    assert first["validated"] == second["validated"]


def test_a_rank_that_is_killed_in_the_middle_of_an_epoch():
    run = run_elastic(once(kill, rank=1, step=70), strategy=STRATEGY, again=True)
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds == [(2, 0), (1, 60), (1, 0)]  # the last world is that of a second `fit`
    assert "with 1 ranks (0 new) from the commit at step 60; 10 steps are repeated" in run.output
    assert "2 -> 1 ranks: each rank keeps its batch size" in run.output
    assert len({line["pid"] for line in run.lines}) == 2  # the remaining rank keeps its process
    assert run.ends[0]["lr"] == pytest.approx(4e-3 * 0.2)


def test_rank_0_is_killed_with_accumulation_loader_workers_and_a_policy():
    run = run_elastic(
        once(kill, rank=0, step=35),
        strategy={"commit_every_n_steps": 10},
        num_workers=1,
        trainer={"accumulate_grad_batches": 2, "max_epochs": 2 * NUM_EPOCHS},
        policy={"ScaleLearningRate": {}},
    )
    check_is_as_accurate_as_uninterrupted(run, num_epochs=2 * NUM_EPOCHS)
    assert run.worlds == [(2, 0), (1, 30)]
    assert "2 -> 1 ranks: each rank keeps its batch size, and learning rates are multiplied by 0.5" in run.output
    assert run.ends[0]["lr"] == pytest.approx(4e-3 * 0.2 / 2)


def test_an_added_rank_trains_parameters_that_the_other_has_unfrozen():
    added = once(partial(change_hosts, hosts=(FIRST, SECOND)), rank=0, step=60)
    run = run_elastic(added, hosts=(FIRST,), strategy=STRATEGY, pause_s=0.03, unfreezes_at=0)
    check_is_as_accurate_as_uninterrupted(run)
    assert [size for size, _ in run.worlds] == [1, 2]
    assert "with 2 ranks (1 new)" in run.output
    assert "; 0 steps are repeated" in run.output


def kill_rank_0_of_three(net: Net, at: str) -> None:
    has_joined = net.size == 3 and net.num_batches >= 5 and net.trainer.global_step >= 90
    if at == "train" and net.global_rank == 0 and has_joined and net.first("kill"):
        kill(net)


def test_a_rank_is_added_and_another_is_killed():
    added = once(partial(change_hosts, hosts=(FIRST, SECOND, THIRD)), rank=0, step=60)
    run = run_elastic(added, kill_rank_0_of_three, strategy=STRATEGY, pause_s=0.1, policy={"KeepGlobalBatch": {}})
    check_is_as_accurate_as_uninterrupted(run)
    assert [size for size, _ in run.worlds] == [2, 3, 2]
    assert "2 -> 3 ranks: the global batch size is unchanged, and is divided by 3" in run.output
    sizes = {len(line["samples"]) for line in run.having("samples")}
    assert {16, 11} <= sizes  # of 32 samples: 16 for each of two ranks, and 11 for each of three
    assert max(sizes) <= 17  # the last batch of an epoch may have one more sample


def test_a_host_loss_is_detected_and_the_other_host_continues(tmp_path):
    try:
        with two_hosts(tmp_path) as hosts:
            put_ssh(hosts, tmp_path, detects_loss=True)
            run = run_elastic(
                once(unplug, rank=0, step=70),
                hosts=tuple(host.name for host in hosts),
                arguments=("--gloo-timeout-seconds", "600"),
                enter=tuple(hosts[0].enter()),
                variables={"PATH": os.pathsep.join([str(tmp_path), str(BIN), os.environ["PATH"]])},
                strategy=STRATEGY,
            )
    except NoHostsError as error:
        pytest.skip(str(error))
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds == [(2, 0), (1, 60)]
    assert "does not respond" in run.output


def test_a_rank_is_killed_during_a_commit():
    run = run_elastic(once(kill, rank=1, step=60, during="commit"), strategy=STRATEGY)
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds == [(2, 0), (1, 40)]
    assert "; 20 steps are repeated" in run.output


def test_a_rank_is_killed_during_validation():
    run = run_elastic(once(kill, rank=0, step=50, during="validation"), strategy=STRATEGY, is_manual=True)
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds == [(2, 0), (1, 80)]
    assert "; 10 steps are repeated" in run.output


def test_a_hung_rank_is_killed():
    run = run_elastic(once(stop, rank=1, step=70), strategy={**STRATEGY, "hang_timeout": 4})
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds == [(2, 0), (1, 60)]
    assert "rank 1 is stopped" in run.output
    assert "Killing rank 1 so that the other ranks can continue." in run.output


def test_too_few_ranks_save_a_checkpoint_from_which_fit_continues(tmp_path):
    run = run_elastic(
        once(kill, rank=1, step=70),
        min_ranks=2,
        arguments=("--elastic-timeout", "8"),
        results_path=tmp_path,
        strategy=STRATEGY,
    )
    assert run.code != 0
    assert "TooFewRanksError: This rank received a SIGTERM before it joined a new world" in run.output
    (path,) = run.checkpoints
    assert f"ckpt_path='{path}'" in run.output
    assert run.checkpoints[path]["global_step"] == 60
    run = run_elastic(hosts=(SECOND,), results_path=tmp_path, strategy=STRATEGY, ckpt_path=path)
    check_is_as_accurate_as_uninterrupted(run, from_disk=True)
    assert run.worlds == [(2, 0), (1, 60)]


def test_a_host_is_removed():
    removed = once(partial(change_hosts, hosts=(FIRST,)), rank=0, step=60)
    run = run_elastic(removed, strategy=STRATEGY, pause_s=0.1)
    check_is_as_accurate_as_uninterrupted(run)
    assert [size for size, _ in run.worlds] == [2, 1]
    assert "; 0 steps are repeated" in run.output
    assert "This rank exits: its host was removed" in run.output


def test_one_of_two_ranks_of_a_host_is_killed():
    run = run_elastic(once(kill, rank=1, step=50), hosts=(f"{FIRST}:2", SECOND), strategy=STRATEGY)
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds == [(3, 0), (1, 40)]
    assert "This rank exits: its host was removed, or is blacklisted" in run.output, run.output
    assert "TooFewRanksError" not in run.output
    # On a busy machine the driver may take long to form a world. The rank then saves a checkpoint and logs it.
    assert bool(run.checkpoints) == ("This rank has waited" in run.output)


@pytest.mark.parametrize(
    ("at", "pause_s", "num_repeated"), [("train", 0.0, 0), ("validation", 0.2, 0), ("validation", 1.8, 5)]
)
def test_a_rank_that_gets_a_sigterm_leaves(at, pause_s, num_repeated):
    run = run_elastic(once(terminate, rank=1, step=30, during=at), strategy=STRATEGY, validation_pause_s=pause_s)
    check_is_as_accurate_as_uninterrupted(run)
    assert [size for size, _ in run.worlds] == [2, 1]
    assert "This rank leaves the world after a SIGTERM." in run.output
    assert f"; {num_repeated} steps are repeated" in run.output


def test_a_rank_raises_an_exception():
    run = run_elastic(once(fail, rank=0, step=70), strategy=STRATEGY)
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds == [(2, 0), (1, 60)]
    assert "ValueError: a bad sample" in run.output

"""Workers that exit during ``fit``, with ``ddp_spawn_elastic_ext``: other workers continue, and a new worker joins.

Each run trains on digits for the number of epochs of an uninterrupted run, counts every sample,
and must be as accurate.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_strategies_ext import DDPSpawnElasticStrategy, DDPSpawnStrategy
from lightning_strategies_ext.elastic import commit
from tests.support.elastic_runs import (
    STRATEGY,
    UNTIL_IT_JOINS,
    Run,
    check_is_as_accurate_as_uninterrupted,
    run_workers,
)
from tests.support.elastic_script import NUM_EPOCHS, Net, fail, joins_later, kill, once, sleep, stop
from tests.support.models import MLP, fit, loader, make_trainer
from tests.support.ranks import run_script


def sizes_of(run: Run) -> list[int]:
    return [size for size, _ in run.worlds]


@pytest.mark.processes
def test_a_run_without_failures_and_other_stages_after_it():
    run = run_workers(2, strategy=STRATEGY, again=True)
    check_is_as_accurate_as_uninterrupted(run, within=0.01)
    assert run.worlds == [(2, 0), (2, 0)]  # the last world is that of a second `fit`


class LogsSamples(MLP):
    """A model that logs the sum of its samples in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("sum", batch[0].sum(), on_step=True, sync_dist=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.sums.append(float(self.trainer.callback_metrics["sum"]))


@pytest.mark.processes
def test_the_values_of_a_step_leave_out_a_worker_without_samples():
    model, samples = LogsSamples(), loader(num_samples=5, batch_size=1)
    make_trainer(DDPSpawnElasticStrategy(), max_epochs=1).fit(model, samples)
    assert len(model.sums) == 3
    assert sum(model.sums) == pytest.approx(float(samples.dataset.tensors[0].sum()), abs=1e-4)


@pytest.mark.processes
@pytest.mark.parametrize(("rank", "compression"), [(0, None), (1, "powersgd")])
def test_a_killed_worker_is_restarted_and_joins(rank, compression):
    killed = once(kill, rank=rank, step=70)
    strategy = {**STRATEGY, "compression": compression}
    run = run_workers(2, killed, joins_later, strategy=strategy, unfreezes_at=rank, **UNTIL_IT_JOINS)
    check_is_as_accurate_as_uninterrupted(run)
    assert sizes_of(run) == [2, 1, 2]
    assert run.worlds[1] == (1, 60)
    assert "with 1 ranks (0 new) from the commit at step 60; 10 steps are repeated" in run.output
    assert "with 2 ranks (1 new)" in run.output
    assert "; 0 steps are repeated" in run.output
    assert f"restarting worker {rank} (" in run.output
    assert len({line["pid"] for line in run.having("samples")}) == 3  # the remaining worker keeps its process
    # Each worker keeps its device when its rank changes. The new worker has the device of the killed worker.
    assert {(line["rank"], line["world"], line["slot"]) for line in run.having("slot")} == {
        *((0, 2, 0), (1, 2, 1)),
        *((0, 1, 1 - rank), (0, 2, 1 - rank), (1, 2, rank)),
    }


@pytest.mark.processes
def test_two_ranks_are_killed_with_accumulation_loader_workers_and_a_policy():
    run = run_workers(
        3,
        *(once(kill, rank=rank, step=35) for rank in (0, 2)),
        joins_later,
        strategy={"commit_every_n_steps": 10},
        num_workers=1,
        trainer={"accumulate_grad_batches": 2, "max_epochs": 2 * NUM_EPOCHS},
        policy={"KeepGlobalBatch": {}},
        pause_s=0.1,
        pauses_in=[1, 2],
    )
    check_is_as_accurate_as_uninterrupted(run, num_epochs=2 * NUM_EPOCHS)
    assert sizes_of(run)[0] == 3
    assert min(sizes_of(run)) in (1, 2)
    assert sizes_of(run)[-1] == 3
    assert "the global batch size is unchanged, and is divided by 3" in run.output


@pytest.mark.processes
def test_a_worker_is_killed_during_a_commit():
    run = run_workers(2, once(kill, rank=1, step=60, during="commit"), joins_later, strategy=STRATEGY)
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds[:2] == [(2, 0), (1, 40)]


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_worker_is_killed_during_validation_in_manual_optimization(backend):
    killed = once(kill, rank=0, step=50, during="validation")
    strategy = {**STRATEGY, "process_group_backend": backend}
    run = run_workers(2, killed, joins_later, strategy=strategy, is_manual=True)
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds[:2] == [(2, 0), (1, 80)]


def kill_the_first_replacement(net: Net, at: str) -> None:
    if at == "setup" and net.is_replacement and net.first("kill the replacement"):
        kill(net)


@pytest.mark.processes
def test_a_new_worker_is_killed_before_it_has_joined():
    faults = once(kill, rank=1, step=70), kill_the_first_replacement, joins_later
    run = run_workers(2, *faults, strategy=STRATEGY, **UNTIL_IT_JOINS)
    check_is_as_accurate_as_uninterrupted(run)
    assert sizes_of(run) == [2, 1, 2]
    assert "It had not joined them yet" in run.output


@pytest.mark.processes
@pytest.mark.parametrize(
    ("action", "rank", "cause"),
    [(stop, 0, "rank 1 waited 4 s for it in"), (sleep, 1, "no activity was detected")],
)
def test_after_a_hang_the_worker_is_killed_and_restarted(action, rank, cause):
    strategy = {**STRATEGY, "hang_timeout": 4}
    run = run_workers(2, once(action, rank=rank, step=70), joins_later, strategy=strategy, **UNTIL_IT_JOINS)
    check_is_as_accurate_as_uninterrupted(run)
    assert sizes_of(run) == [2, 1, 2]
    assert run.worlds[1] == (1, 60)
    assert f"rank {rank} on " in run.output
    assert "is stuck" in run.output
    assert cause in run.output
    assert f"Killing rank {rank} so that the other ranks can continue." in run.output
    assert "was killed by SIGKILL" in run.output


def call_barrier(net: Net) -> None:
    net.trainer.strategy.barrier()


@pytest.mark.processes
def test_a_collective_by_one_worker_alone_ends_fit():
    strategy = {**STRATEGY, "hang_timeout": 4, "process_group_backend": "gloo", "max_restarts": 0}
    run = run_workers(2, once(call_barrier, rank=1, step=30), strategy=strategy)
    assert run.code != 0
    assert "stuck" in run.output
    assert "so that the other ranks can continue." in run.output
    assert "WorkerDiedError" in run.output


def kill_rank_0_when_its_replacement_has_joined(net: Net, at: str) -> None:
    has_joined = net.has_happened("process 2") and net.size == 2
    if at == "train" and net.global_rank == 0 and has_joined and net.first("kill again"):
        kill(net)


@pytest.mark.processes
def test_more_than_max_restarts_end_fit_with_the_first_failure():
    faults = once(kill, rank=0, step=30), kill_rank_0_when_its_replacement_has_joined
    run = run_workers(2, *faults, strategy={**STRATEGY, "max_restarts": 1}, **UNTIL_IT_JOINS)
    assert run.code != 0
    assert "WorkerDiedError" in run.output
    assert "`max_restarts=1` within 600 s (`restart_window`) is reached" in run.output


def kill_the_last_rank(net: Net, at: str) -> None:
    if at == "train" and net.size == 1 and net.first("kill the last rank"):
        kill(net)


@pytest.mark.processes
def test_all_workers_with_a_commit_are_killed():
    run = run_workers(2, once(kill, rank=0, step=30), kill_the_last_rank, joins_later, strategy=STRATEGY)
    assert run.code != 0
    assert "No other worker has a state to continue from" in run.output


@pytest.mark.processes
def test_an_exception_restarts_no_worker():
    run = run_workers(2, once(fail, rank=1, step=30), strategy=STRATEGY)
    assert run.code != 0
    assert "rank 1" in run.output
    assert "ValueError: a bad sample" in run.output
    assert "restarting worker" not in run.output


@pytest.mark.processes
def test_fewer_than_min_workers_wait_for_a_new_one():
    run = run_workers(2, once(kill, rank=1, step=70), strategy={**STRATEGY, "min_workers": 2})
    check_is_as_accurate_as_uninterrupted(run)
    assert run.worlds == [(2, 0), (2, 60)]


SIGNALS_MAIN_PROCESS = """
import os
import signal
import sys

from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.support.models import MLP, loader, make_trainer


class SignalsMainProcess(MLP):
    def __init__(self):
        super().__init__()
        self.main = os.getpid()

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 5 and self.global_rank == 1:
            os.kill(self.main, int(sys.argv[1]))
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    saving = OnExceptionCheckpoint(sys.argv[2])
    trainer = make_trainer("ddp_spawn_elastic_ext", max_epochs=-1, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(SignalsMainProcess(), loader())
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_main_process_stops_fit_and_returns_the_state(tmp_path: Path, number: signal.Signals):
    script = tmp_path / "script.py"
    script.write_text(SIGNALS_MAIN_PROCESS)
    result = run_script(script, str(int(number)), tmp_path)
    assert "is lost" not in result.stdout, result.stdout
    assert result.returncode == {signal.SIGINT: 1, signal.SIGTERM: 0}[number], result.stdout  # as without elastic
    (path,) = tmp_path.glob("*.ckpt")
    assert torch.load(path, weights_only=False)["global_step"] >= 6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"min_workers": 0}, ValueError, "min_workers=0"),
        ({"max_restarts": 1.5}, TypeError, "max_restarts"),
        ({"restart_window": 0}, ValueError, "`restart_window` must be positive, got 0"),
        ({"commit_every_n_steps": 0}, ValueError, "commit_every_n_steps=0"),
        ({"hang_timeout": 0}, ValueError, "`hang_timeout` must be positive, got 0"),
        ({"uneven_inputs": "error"}, ValueError, "uneven_inputs='error'"),
        ({"start_method": "fork"}, ValueError, "start_method='fork'"),
        ({"scale_learning_rate": 2}, TypeError, "scale_learning_rate"),
        ({"elastic": False}, TypeError, "elastic=False"),
    ],
)
def test_invalid_arguments_are_errors_at_construction(arguments, error, message):
    with pytest.raises(error, match=message):
        DDPSpawnElasticStrategy(**arguments)


class ShortOfMemory(MLP):
    """A model whose commits have about 2,000 bytes, in workers with 3,000 bytes of free memory in total."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        commit.free_memory = lambda: 3000


@pytest.mark.processes
def test_a_commit_that_does_not_fit_ends_fit_with_an_error():
    with pytest.raises(
        commit.CommitTooLargeError, match=r"each of the 2 ranks of this host stores one; 0\.0 GiB .*`devices="
    ):
        fit(DDPSpawnElasticStrategy(commit_every_n_steps=2), ShortOfMemory, max_epochs=1)


def test_elastic_selects_the_class_and_other_options_require_it():
    assert type(DDPSpawnStrategy(elastic=True, min_workers=2, max_restarts=0)) is DDPSpawnElasticStrategy
    with pytest.raises(ValueError, match="max_restarts=1"):
        DDPSpawnStrategy(max_restarts=1)
    with pytest.raises(TypeError, match="elastic"):
        DDPSpawnStrategy(elastic="yes")

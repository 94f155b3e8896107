"""Lightning's callbacks in elastic training: commits include their changes of the Trainer."""

import time
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelPruning

from lightning_strategies_ext import WorldSizePolicy
from lightning_strategies_ext.elastic import fit
from tests.support.elastic_runs import Run, run_torchrun, run_workers
from tests.support.elastic_script import NUM_EPOCHS, Net, joins_later, kill, once, terminate
from tests.support.models import MLP, loader, make_trainer

pytestmark = pytest.mark.processes

#: Numbers of steps: 45 in epoch 0, 15 in each later epoch. Weight averaging begins in epoch 2.
CALLBACKS: dict[str, dict[str, Any]] = {
    "LearningRateFinder": {"num_training_steps": 30, "early_stop_threshold": None},
    "GradientAccumulationScheduler": {"scheduling": {0: 1, 1: 3}},
    "StochasticWeightAveraging": {"swa_lrs": 1e-3, "swa_epoch_start": 3, "annealing_epochs": 1},
}
STRATEGY = {"commit_every_n_steps": 6}


def finals(run: Run) -> list[dict[str, Any]]:
    """Returns the state of each rank at the end of `fit`, without its rank and process."""
    assert run.code == 0, run.output
    keys = "final", "lr", "max_epochs", "step", "accumulated"
    return [{key: line[key] for key in keys} for line in run.having("final")]


def kill_in_last_epoch(net: Net, at: str) -> None:
    """Kills rank 0 in the epoch in which `StochasticWeightAveraging` trains nothing."""
    if at == "train" and net.global_rank == 0 and net.current_epoch == 4 and net.first("kill in the last epoch"):
        kill(net)


def test_restarted_ranks_have_the_final_state_of_an_uninterrupted_run():
    uninterrupted = finals(run_torchrun(2, strategy=STRATEGY, callbacks=CALLBACKS))
    assert len(uninterrupted) == 2
    assert uninterrupted[0] == uninterrupted[1]
    assert uninterrupted[0]["lr"] != 4e-3
    kills = once(kill, rank=0, step=50), kill_in_last_epoch
    assert finals(run_torchrun(2, *kills, strategy=STRATEGY, callbacks=CALLBACKS)) == uninterrupted


def test_a_worker_that_joins_has_the_final_state_of_the_others():
    kills = once(kill, rank=1, step=50), once(kill, rank=1, step=80)
    pauses: dict[str, Any] = {"pause_s": 0.05, "pauses_in": [1]}
    run = run_workers(2, *kills, joins_later, strategy=STRATEGY, callbacks=CALLBACKS, **pauses)
    ends = finals(run)
    assert len(ends) == 2
    assert ends[0] == ends[1]
    assert ends[0]["lr"] != 4e-3
    sizes = [size for size, _ in run.worlds]
    assert sizes.count(1) == 2
    assert sizes[-1] == 2


def terminate_in_last_epoch(net: Net, at: str) -> None:
    """Sends a SIGTERM to rank 1 in the long epoch in which `StochasticWeightAveraging` trains nothing."""
    fit.VALIDATION_GRACE_S = 0.2
    if at == "train" and net.trainer.max_epochs > NUM_EPOCHS and net.current_epoch == NUM_EPOCHS:
        time.sleep(0.2)
        if net.global_rank == 1 and net.first("terminate"):
            terminate(net)


def test_a_rank_that_gets_a_sigterm_leaves_an_epoch_without_training():
    run = run_workers(2, terminate_in_last_epoch, strategy=STRATEGY, callbacks=CALLBACKS)
    ends = finals(run)
    assert "This rank leaves the world after a SIGTERM." in run.output
    assert all(end == ends[0] for end in ends)


def double_accumulation(trainer: Any, module: Any, old: int, new: int) -> None:
    trainer.accumulate_grad_batches *= 2


def accumulate_more_in_each_world(net: Net, at: str) -> None:
    if at == "setup":
        WorldSizePolicy.on_world_size_change = lambda self, *args: double_accumulation(*args)
    if at == "train":
        net.write_line(accumulates=net.trainer.accumulate_grad_batches, size=net.size)


def test_settings_that_a_policy_changes_are_kept():
    kills = once(kill, rank=1, step=10), accumulate_more_in_each_world
    pauses: dict[str, Any] = {"pause_s": 0.05, "pauses_in": [1]}
    run = run_workers(2, *kills, joins_later, strategy=STRATEGY, trainer={"max_epochs": 2}, **pauses)
    assert run.code == 0, run.output
    found = {(line["size"], line["accumulates"]) for line in run.having("accumulates")}
    assert found in ({(2, 1), (1, 2), (2, 4)}, {(2, 1), (1, 2)})


def test_pruning_is_refused():
    trainer = make_trainer("ddp_spawn_elastic_ext", callbacks=[ModelPruning("l1_unstructured", amount=0.3)])
    with pytest.raises(ValueError, match="`ModelPruning` cannot be combined with elastic training"):
        trainer.fit(MLP(), loader())

"""SLURM's signal before the time limit, on any rank: all ranks save before the same step, and a new job continues."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.support.models import MLP, StatefulLoader, assert_same_bits, dataset, loader, make_trainer, state_of
from tests.support.ranks import run_ranks
from tests.support.slurm import num_lines, put_scontrol, sbatch, variables_of_job, variables_of_task

pytestmark = pytest.mark.processes

#: Batches per accumulation window; the signal arrives in the middle of a window, and of an epoch.
WINDOW, BATCH = 3, 4
JOB = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
srun python train.py "$@"
"""
TRAIN = """\
import sys
from pathlib import Path

import torch

from tests.pytorch.test_requeueing import train

rank, *result = train("ddp_ext", Path(sys.argv[1]), sys.argv[2])
torch.save(result, Path(sys.argv[1], f"result{rank}"))
"""


class Signalled(Callback):
    """A callback that sends signals to ranks before a batch of training or of validation, or after the last batch."""

    def __init__(self, moment: str, signals: dict[int, signal.Signals]) -> None:
        self.moment = moment
        self.signals = signals

    def send(self, trainer: Any, moment: str) -> None:
        if moment == self.moment and trainer.global_rank in self.signals:
            os.kill(os.getpid(), self.signals[trainer.global_rank])

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == BATCH:
            self.send(trainer, "train")

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == (0 if trainer.sanity_checking else BATCH):
            self.send(trainer, "sanity check" if trainer.sanity_checking else "validation")

    def on_train_end(self, trainer, pl_module):
        self.send(trainer, "end")


class Slow(MLP):
    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        time.sleep(0.05)

    test_step = validation_step


class ValidationLosses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.losses.append(trainer.callback_metrics["val_loss"].item())

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


def train(strategy: str, directory: Path, moment: str) -> tuple[int, dict[str, torch.Tensor], list[float]]:
    """Trains for two epochs; in the first run under SLURM, rank 1 receives the signal before the time limit."""
    is_first = "SLURM_JOB_ID" in os.environ and "SLURM_RESTART_COUNT" not in os.environ
    callbacks = [ValidationLosses(), *([Signalled(moment, {1: signal.SIGUSR1})] if is_first else [])]
    torch.manual_seed(0)
    kwargs = {"accumulate_grad_batches": WINDOW, "max_epochs": 2, "callbacks": callbacks, "num_sanity_val_steps": 4}
    trainer, model = make_trainer(strategy, default_root_dir=directory, **kwargs), Slow()
    trainer.fit(model, StatefulLoader(dataset(), batch_size=4), loader(num_samples=160))
    return trainer.global_rank, state_of(model), callbacks[0].losses


@pytest.mark.parametrize("moment", ["train", "validation", "sanity check"])
def test_a_requeued_job_continues_and_has_the_weights_of_an_uninterrupted_job(tmp_path, moment: str):
    script, programs = tmp_path / "job.slurm", tmp_path / "programs"
    programs.mkdir()
    script.write_text(JOB)
    (tmp_path / "train.py").write_text(TRAIN)
    result = sbatch(script, tmp_path, moment, submitted_from=tmp_path, programs=programs)
    assert result.returncode == 0, result.stdout
    assert (programs / "requests").read_text() == "requeue 4711\n"
    (checkpoint,) = tmp_path.glob("hpc_ckpt_*")
    batches = torch.load(checkpoint, weights_only=False)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    assert batches["ready"] == batches["completed"]
    assert batches["ready"] % WINDOW == 0 or batches["ready"] == 8  # the last batch of the epoch
    for rank, (_, *expected) in enumerate(run_ranks(train, "ddp", tmp_path / "other", moment)):
        weights, losses = torch.load(tmp_path / f"result{rank}")
        assert_same_bits(weights, expected[0])
        assert losses == expected[1]


def under_slurm(function: Callable[[Any], Any], directory: Path, signalled: Signalled) -> Any:
    """Returns the value of a function that is called with a Trainer, on a rank with SLURM's variables."""
    os.environ.update({**variables_of_job(1, 2), **variables_of_task(int(os.environ["LOCAL_RANK"]), 2)})
    os.environ["PATH"] = f"{directory}{os.pathsep}{os.environ['PATH']}"
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        del os.environ[name]
    trainer = make_trainer("ddp_ext", default_root_dir=directory, max_epochs=1, callbacks=[signalled])
    return function(trainer)


def validate_for_long(trainer: Any) -> int:
    trainer.fit(Slow(), loader(), loader(num_samples=160))
    return trainer.global_step


def test_a_requeue_in_a_validation_does_not_wait_for_its_end(tmp_path: Path):
    requests = put_scontrol(tmp_path)
    signalled = Signalled("validation", {0: signal.SIGUSR1, 1: signal.SIGUSR1})
    assert run_ranks(under_slurm, validate_for_long, tmp_path, signalled) == [8, 8]
    assert requests.read_text() == "requeue 4711\n"
    loops = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)["loops"]["fit_loop"]
    assert loops["epoch_loop.val_loop.batch_progress"]["current"]["processed"] == 0


def fit_then_test(trainer: Any) -> tuple[int, int]:
    model = Slow()
    trainer.fit(model, loader())
    requests = Path(trainer.default_root_dir, "requests")
    trainer.strategy.barrier()
    before = num_lines(requests)
    trainer.test(model, loader())
    return before, num_lines(requests)


def test_a_requeue_signal_after_the_last_step_applies_to_the_next_stage(tmp_path: Path):
    put_scontrol(tmp_path)
    signalled = Signalled("end", {1: signal.SIGUSR1})
    assert run_ranks(under_slurm, fit_then_test, tmp_path, signalled) == [(0, 1), (0, 1)]


def stop(trainer: Any) -> tuple[int, bool]:
    with pytest.raises(SIGTERMException):
        trainer.fit(MLP(), loader())
    return trainer.global_step, trainer.received_sigterm


def test_all_ranks_save_before_they_stop_after_a_sigterm(tmp_path: Path):
    requests = put_scontrol(tmp_path)
    signalled = Signalled("train", {0: signal.SIGTERM, 1: signal.SIGUSR1})
    (step, is_stopped), other = run_ranks(under_slurm, stop, tmp_path, signalled)
    assert (step, is_stopped) == other
    assert is_stopped
    assert BATCH <= step < 8
    assert requests.read_text() == "requeue 4711\n"
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)["global_step"] == step

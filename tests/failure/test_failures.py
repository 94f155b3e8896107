"""Failures of ``ddp_ext``: a SIGTERM on any rank stops all ranks, and a failure ends all ranks."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint

from lightning_strategies_ext.failure import policies, process_exit
from tests.support.models import MLP, NUM_CLASSES, NUM_FEATURES, assert_same_bits, fit, loader, make_trainer, state_of
from tests.support.ranks import outcomes_of_ranks, run_ranks, start_script

pytestmark = pytest.mark.processes

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
NUM_STEPS = 240
BATCHES_PER_EPOCH = 40
SECONDS_PER_STEP = 0.02


# --- functions of ranks ---


class Steady(MLP):
    """A model that selects batches by the number of the step. A resumed run uses the batches of an uninterrupted run.

    (Lightning resumes an interrupted epoch with the first batch of a loader, unless the loader is stateful.)
    """

    def __init__(self, seconds_per_step: float = 0.0) -> None:
        super().__init__()
        self.seconds_per_step = seconds_per_step

    def training_step(self, batch, batch_idx):
        time.sleep(self.seconds_per_step)
        generator = torch.Generator().manual_seed(2 * self.global_step + self.global_rank)
        features = torch.randn(4, NUM_FEATURES, generator=generator)
        return self.loss((features, features[:, :NUM_CLASSES].argmax(dim=1)))

    def validation_step(self, batch, batch_idx):
        time.sleep(self.seconds_per_step)
        super().validation_step(batch, batch_idx)


class Report(Callback):
    """A callback that writes files: the process ID of each rank during training, and the end of each rank's run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            self.write(f"training{trainer.global_rank}", os.getpid())

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 2:
            self.write(f"validating{trainer.global_rank}", os.getpid())

    def on_exception(self, trainer, pl_module, exception):
        end = [type(exception).__name__, trainer.received_sigterm, trainer.global_step]
        self.write(f"end{trainer.global_rank}", end)

    def write(self, name: str, content: Any) -> None:
        draft = self.directory / f"{name}.draft"
        draft.write_text(json.dumps(content))
        draft.rename(self.directory / name)


def train(
    directory: Path, seconds_per_step: float = 0.0, callbacks: list[Callback] | None = None, **fit_options: Any
) -> dict[str, torch.Tensor]:
    """Trains for NUM_STEPS with validation after each epoch, and returns the weights."""
    torch.manual_seed(3)
    model = Steady(seconds_per_step)
    trainer = make_trainer(
        "ddp_ext",
        max_steps=NUM_STEPS,
        max_epochs=-1,
        enable_checkpointing=True,
        callbacks=[*(callbacks or []), Report(directory), OnExceptionCheckpoint(directory)],
    )
    trainer.fit(model, loader(8 * BATCHES_PER_EPOCH), loader(8 * BATCHES_PER_EPOCH), **fit_options)
    return state_of(model)


class Fail(Callback):
    """A callback that raises at step 5 on some ranks. Other ranks may sleep; then no closed connection wakes them."""

    def __init__(self, *failing: int, others_are_stuck: bool = False) -> None:
        self.failing = failing
        self.others_are_stuck = others_are_stuck
        self.is_armed = True

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step < 5 or not self.is_armed:
            return
        self.is_armed = False
        if trainer.global_rank in self.failing:
            raise KeyError(f"bad sample on rank {trainer.global_rank}")
        if self.others_are_stuck:
            time.sleep(600)


# --- scripts of tests ---

SCRIPT = """
import sys
from pathlib import Path

from tests.failure import test_failures

directory, what = Path(sys.argv[1]), sys.argv[2]
getattr(test_failures, what)(directory)
"""


def train_slowly(directory: Path) -> None:
    train(directory, SECONDS_PER_STEP)


def train_until_rank_1_fails(directory: Path) -> None:
    train(directory, callbacks=[Fail(1)])


def train_until_rank_1_fails_and_rank_0_is_stuck(directory: Path) -> None:
    policies.GRACE_S = 2.0
    train(directory, callbacks=[Fail(1, others_are_stuck=True)])


def fit_test_and_tear_down_twice(directory: Path) -> None:
    trainer, model = fit("ddp_ext")
    trainer.test(model, loader(), verbose=False)
    for _ in range(2):
        trainer.strategy.teardown()


class Run:
    """A script that runs in a separate process, as started by a user."""

    def __init__(self, directory: Path, function: Callable[[Path], None], *launcher: str) -> None:
        self.directory = directory
        self.script = directory / "script.py"
        self.script.write_text(SCRIPT)
        # One thread, like the ranks whose weights are compared.
        self.process = start_script(*launcher, self.script, directory, function.__name__)

    def pids(self, moment: str, timeout_s: float = 180) -> list[int]:
        """Waits until both ranks are "training" or "validating"; returns their process IDs."""
        files = [self.directory / f"{moment}{rank}" for rank in range(2)]
        deadline = time.monotonic() + timeout_s
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline, f"{files} are still missing after {timeout_s} s"
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.01)
        return [json.loads(file.read_text()) for file in files]

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Waits until all processes of the run have exited; returns the exit code and the output."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"after {timeout_s} s, {self.processes()} still run:\n{error.output}") from None
        psutil.wait_procs(self.processes(), timeout=2)
        assert self.processes() == [], output
        return self.process.returncode, output

    def ends(self) -> list[Any]:
        """Returns the end of the run on each rank: name of the exception, `trainer.received_sigterm`, global step."""
        return [json.loads((self.directory / f"end{rank}").read_text()) for rank in range(2)]

    def processes(self) -> list[psutil.Process]:
        """Returns the running processes of the script, also if their parent has exited."""
        processes = psutil.process_iter(["cmdline"])
        return [process for process in processes if str(self.script) in (process.info["cmdline"] or [])]

    def stop(self) -> None:
        for process in self.processes():
            process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts a script that runs a function of this module, and kills its remaining processes after the test."""
    runs = []

    def start(function: Callable[[Path], None], *launcher: str) -> Run:
        runs.append(Run(tmp_path, function, *launcher))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Returns the weights after NUM_STEPS steps of an uninterrupted run."""
    return run_ranks(train, tmp_path_factory.mktemp("uninterrupted"))[0]


# --- SIGTERM ---


@pytest.mark.parametrize(
    ("signalled", "moment", "launcher"),
    [(1, "training", ()), (0, "training", ()), (1, "validating", TORCHRUN)],
    ids=["on rank 1", "on rank 0", "in validation under torchrun"],
)
def test_a_sigterm_on_one_rank_stops_all_ranks_at_the_same_step_and_nothing_is_lost(
    start, tmp_path, uninterrupted, signalled, moment, launcher
):
    run = start(train_slowly, *launcher)
    os.kill(run.pids(moment)[signalled], signal.SIGTERM)
    exit_code, output = run.end(timeout_s=300)
    assert exit_code == 0, output
    (name, received, step), other = run.ends()
    assert [name, received, step] == other
    assert (name, received) == ("SIGTERMException", True)
    assert 2 <= step < NUM_STEPS
    for resumed in run_ranks(resume, tmp_path):
        assert_same_bits(resumed, uninterrupted)


def resume(directory: Path) -> dict[str, torch.Tensor]:
    return train(directory, ckpt_path=directory / "on_exception.ckpt")


class Interrupt(Callback):
    """A callback that sends a SIGTERM to this process at batch 3 of a stage, and counts the batches."""

    def __init__(self, is_signalled: bool, stage: str) -> None:
        self.is_signalled = is_signalled
        self.num_batches = 0
        setattr(self, f"on_{stage}_batch_start", self.on_batch_start)

    def on_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.num_batches += 1
        time.sleep(SECONDS_PER_STEP)
        if self.is_signalled and batch_idx == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def interrupt_each_stage(*signalled: int) -> dict[str, Any]:
    rank = int(os.environ["LOCAL_RANK"])
    ends = {}
    for stage, method in [
        ("train", "fit"), ("validation", "fit"), ("validation", "validate"), ("test", "test"), ("predict", "predict"),
    ]:  # fmt: skip
        interrupt = Interrupt(rank in signalled, stage)
        trainer = make_trainer("ddp_ext", callbacks=[interrupt])
        loaders = [loader(800)] if stage != "validation" or method != "fit" else [loader(), loader(800)]
        with pytest.raises(SystemExit):
            getattr(trainer, method)(MLP(), *loaders)
        ends[f"{stage} in {method}"] = (interrupt.num_batches, trainer.received_sigterm, trainer.state.status.value)
    return ends


@pytest.mark.parametrize("signalled", [(0,), (1,), (0, 1)])
def test_a_sigterm_stops_the_stage_on_all_ranks_and_does_not_affect_the_next_stage(signalled):
    first, second = run_ranks(interrupt_each_stage, *signalled)
    assert first == second
    assert len(first) == 5
    for num_batches, received_sigterm, status in first.values():
        assert 4 <= num_batches < 100
        assert received_sigterm
        assert status == "interrupted"


class InterruptAfterTheLastStep(Callback):
    def __init__(self, signalled: int) -> None:
        self.signalled = signalled

    def on_train_end(self, trainer, pl_module):
        if trainer.global_rank == self.signalled:
            os.kill(os.getpid(), signal.SIGTERM)


def fit_and_test_when_signalled_at_the_end_of_fit(signalled: int) -> str:
    trainer = make_trainer("ddp_ext", callbacks=[InterruptAfterTheLastStep(signalled)])
    model = MLP()
    trainer.fit(model, loader())
    with pytest.raises(SystemExit):
        trainer.test(model, loader())
    return trainer.state.status.value


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_sigterm_after_the_last_step_of_a_stage_stops_the_next_stage(signalled):
    assert run_ranks(fit_and_test_when_signalled_at_the_end_of_fit, signalled) == ["interrupted"] * 2


# --- an exception on one rank ---


def test_an_exception_on_one_rank_ends_all_ranks_and_shows_its_traceback(start):
    run = start(train_until_rank_1_fails)
    exit_code, output = run.end(timeout_s=300)
    assert exit_code == 1, output
    *_, block, end = output.split("-" * 80)
    assert end == "\n"
    first, frame, error, *_ = block.strip().splitlines()
    assert re.fullmatch(r"lightning-strategies-ext: rank 1 on .* failed first, in train, epoch 0, step 5:", first)
    assert re.fullmatch(rf"  {__file__}:\d+ in on_train_batch_start", frame)
    assert error == "KeyError: 'bad sample on rank 1'"
    assert "Traceback" not in output
    files = Path(re.search("Report of each rank: (.*)/rank-", block)[1])
    assert "KeyError: 'bad sample on rank 1'" in (files / "rank-1.txt").read_text()
    assert "RankFailedError: rank 1" in (files / "rank-0.txt").read_text()


@pytest.mark.parametrize("failing", [0, 1])
def test_both_ranks_exit_with_an_error_and_leave_a_checkpoint(tmp_path, failing):
    outcomes = outcomes_of_ranks(train, tmp_path, 0.0, [Fail(failing)])
    assert [outcome.exit_code for outcome in outcomes] == [1, 1], f"{outcomes[0]}\n{outcomes[1]}"
    assert f"KeyError: 'bad sample on rank {failing}'" in outcomes[failing].error
    assert re.search(f"RankFailedError: rank {failing} on .* failed first", outcomes[1 - failing].error)
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["global_step"] == 5


def test_a_hung_rank_is_killed_after_another_rank_fails(start):
    run = start(train_until_rank_1_fails_and_rank_0_is_stuck)
    exit_code, output = run.end(timeout_s=300)
    assert exit_code == process_exit.MONITOR_EXIT_CODE, output
    assert (
        "rank 0 was terminated because rank 1 failed: KeyError: 'bad sample on rank 1'. It did not exit by itself"
        in output
    )


def reconcile_while_the_other_is_stuck() -> None:
    policies.GRACE_S = 1.0
    make_trainer("ddp_ext", callbacks=[Reconcile()]).fit(MLP(), loader())


class Reconcile(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 0:
            trainer.strategy.reconciliate_processes("a trace of mine")
            os._exit(3)
        time.sleep(600)


def test_reconciliate_processes_terminates_the_other_ranks_when_a_user_calls_it():
    first, second = outcomes_of_ranks(reconcile_while_the_other_is_stuck)
    assert (first.exit_code, second.exit_code) == (3, process_exit.MONITOR_EXIT_CODE)
    assert "rank 1 was terminated because rank 0 failed: a trace of mine" in second.output


def fit_and_then_fail_on_rank_1(directory: Path) -> None:
    trainer, _ = fit("ddp_ext")
    if trainer.global_rank == 1:
        (directory / "fails").touch()
        raise KeyError("no such file")
    while not (directory / "continue").exists():
        time.sleep(0.05)


def test_a_failure_of_a_script_after_the_last_stage_is_reported(start, tmp_path):
    run = start(fit_and_then_fail_on_rank_1)
    deadline = time.monotonic() + 180
    while not (tmp_path / "fails").exists() or len(run.processes()) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (tmp_path / "continue").touch()
    exit_code, output = run.end(timeout_s=300)
    assert exit_code == 1, output
    assert "rank 1 on " in output, output
    assert "KeyError: 'no such file'" in output


def test_a_second_teardown_is_a_no_op_and_no_process_group_warning_is_printed(start):
    exit_code, output = start(fit_test_and_tear_down_twice).end(timeout_s=300)
    assert exit_code == 0, output
    assert "process group" not in output.lower()
    assert "process_group" not in output

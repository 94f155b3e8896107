"""The promises of ``ddp_spawn_ext`` when a worker fails: one exception that says what, and another try works.

A worker raises, hangs or dies, or cannot be sent what it is to work on.
"""

import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.nn import Module
from torch.utils.data import DataLoader

from lightning_strategies_ext import DDPSpawnStrategy, WorkerDiedError, WorkerRaisedError
from tests.support.models import MLP, loader, make_trainer, state_of
from tests.support.ranks import run_script

pytestmark = pytest.mark.processes

STEPS_BEFORE_FAILURE = 3
# What is promised is 10 seconds; the rest is for a machine that does other things as well.
FAILURE_WITHIN_S = 60
FOREVER_S = 1000


# --- what happens in a worker ---


def raise_value_error() -> None:
    raise ValueError("bad sample")


def raise_value_error_later() -> None:
    time.sleep(0.5)
    raise_value_error()


def raise_key_error() -> None:
    raise KeyError("bad key")


class HoldsALockError(Exception):
    """Cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def raise_what_cannot_be_pickled() -> None:
    raise HoldsALockError("bad lock")


def raise_what_only_this_process_knows() -> None:
    globals()["MadeHereError"] = type("MadeHereError", (Exception,), {"__module__": __name__})
    raise globals()["MadeHereError"]("bad class")


class PrunedError(Exception):
    """Takes other arguments than it passes on."""

    def __init__(self, step: int, *, value: float) -> None:
        super().__init__(f"pruned at step {step}")
        self.value = value


def prune() -> None:
    raise PrunedError(3, value=0.5)


def prune_later() -> None:
    time.sleep(0.5)
    raise PrunedError(3, value=0.7)


def exit_as_scripts_do() -> None:
    raise SystemExit(3)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once() -> None:
    os._exit(3)


def hang() -> None:
    time.sleep(FOREVER_S)


class Acts(MLP):
    """Before its fourth training step, each rank does what it is told to.

    Args:
        actions: rank → what it does.
    """

    def __init__(self, actions: dict[int, Callable[[], None]]) -> None:
        super().__init__()
        self.actions = actions

    def training_step(self, batch, batch_idx):
        if self.global_step == STEPS_BEFORE_FAILURE and self.global_rank in self.actions:
            self.actions[self.global_rank]()
        return super().training_step(batch, batch_idx)


class SeesException(Callback):
    """Notes what the main process's ``on_exception`` finds."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_exception(self, trainer, pl_module, exception):
        self.seen.append((type(exception).__name__, trainer.global_step))


def spawning(start_method: str, **kwargs: Any) -> Trainer:
    return make_trainer(DDPSpawnStrategy(start_method=start_method), **kwargs)


def assert_trains(trainer: Trainer, model: Module) -> None:
    """Fails unless another try trains the model."""
    before, num_steps = state_of(model), trainer.global_step
    trainer.fit(model, loader())
    assert trainer.state.finished
    assert trainer.global_step > num_steps
    assert differs(model, before)


def differs(model: Module, before: dict[str, torch.Tensor]) -> bool:
    return not all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def processes_of(trainer: Trainer) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in trainer.strategy.launcher.pids]


def assert_gone(processes: list[psutil.Process], within_s: float) -> None:
    """Fails unless the processes end in time; one that has ended and that nobody has waited for is gone, too."""
    deadline = time.monotonic() + within_s
    while left := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, f"after {within_s} s there are still {left}"
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


# --- a worker raises ---


@pytest.mark.parametrize(("start_method", "rank"), [("forkserver", 1), ("forkserver", 0), ("fork", 1), ("spawn", 1)])
def test_an_exception_in_a_worker_is_raised_here_with_rank_and_trace_and_another_try_works(start_method, rank):
    model = Acts({rank: raise_value_error})
    trainer = spawning(start_method)
    with pytest.raises(WorkerRaisedError) as caught, within(FAILURE_WITHIN_S):
        trainer.fit(model, loader())
    error = caught.value
    assert str(error).startswith(f"rank {rank} (pid {error.error_pid}) failed: ValueError: bad sample\n")
    assert "in raise_value_error\n" in str(error)
    assert "in training_step\n" in str(error)
    assert error.error_index == rank
    assert type(error.__cause__) is ValueError
    assert error.__cause__.args == ("bad sample",)
    assert isinstance(error, torch.multiprocessing.ProcessRaisedException)
    assert trainer.strategy.launcher.pids == []
    assert not psutil.pid_exists(error.error_pid)
    model.actions = {}
    assert_trains(trainer, model)


@pytest.mark.parametrize("action", [raise_what_cannot_be_pickled, raise_what_only_this_process_knows])
def test_an_exception_that_cannot_be_sent_still_gives_its_message_and_trace(action):
    model = Acts({1: action})
    trainer = make_trainer("ddp_spawn_ext")
    with pytest.raises(WorkerRaisedError, match=r"(?s)rank 1 .* failed: .*Error: bad .*in raise_what") as caught:
        trainer.fit(model, loader())
    assert caught.value.__cause__ is None
    model.actions = {}
    assert_trains(trainer, model)


def test_a_worker_that_exits_as_scripts_do_is_named():
    model = Acts({1: exit_as_scripts_do})
    trainer = make_trainer("ddp_spawn_ext")
    with pytest.raises((WorkerRaisedError, WorkerDiedError), match=r"rank 1 .*3"), within(FAILURE_WITHIN_S):
        trainer.fit(model, loader())
    model.actions = {}
    assert_trains(trainer, model)


@pytest.mark.parametrize("first", [0, 1])
def test_when_both_ranks_raise_the_first_one_is_named(first):
    model = Acts({first: raise_key_error, 1 - first: raise_value_error_later})
    with pytest.raises(WorkerRaisedError, match=f"rank {first} .* failed: KeyError: 'bad key'") as caught:
        make_trainer("ddp_spawn_ext").fit(model, loader())
    assert type(caught.value.__cause__) is KeyError


@pytest.mark.parametrize("strategy", ["ddp_spawn_ext", "ddp_fork_ext", "ddp_spawn_elastic_ext"])
def test_an_exception_of_all_ranks_is_raised_as_it_is(strategy):
    model, sees = Acts({0: prune_later, 1: prune}), SeesException()
    trainer = make_trainer(strategy, callbacks=[sees])
    with pytest.raises(PrunedError, match=r"^pruned at step 3$") as caught:
        trainer.fit(model, loader())
    assert caught.value.args == ("pruned at step 3",)
    assert caught.value.value == 0.7  # rank 0's
    assert isinstance(caught.value.__cause__, WorkerRaisedError)
    assert "in prune_later\n" in str(caught.value.__cause__)
    assert sees.seen == [("PrunedError", STEPS_BEFORE_FAILURE)]
    model.actions = {}
    assert_trains(make_trainer(strategy), model)


@pytest.mark.parametrize("hanging", [0, 1])
def test_a_rank_that_hangs_does_not_keep_the_failure_of_another(hanging):
    model = Acts({hanging: hang, 1 - hanging: raise_value_error})
    trainer = make_trainer("ddp_spawn_ext")
    with pytest.raises(WorkerRaisedError, match=f"rank {1 - hanging} .* failed: ValueError"), within(FAILURE_WITHIN_S):
        trainer.fit(model, loader())
    assert trainer.strategy.launcher.pids == []
    model.actions = {}
    assert_trains(trainer, model)


# --- a worker dies ---


@pytest.mark.parametrize(
    ("start_method", "rank", "action", "exit_code", "how"),
    [
        ("forkserver", 0, kill_itself, -9, "was killed by SIGKILL"),
        ("forkserver", 1, exit_at_once, 3, "exited with exit code 3"),
        ("fork", 1, kill_itself, -9, "was killed by SIGKILL"),
    ],
)
def test_a_worker_that_dies_is_named_with_the_cause_and_another_try_works(start_method, rank, action, exit_code, how):
    model = Acts({rank: action})
    trainer = spawning(start_method)
    with pytest.raises(WorkerDiedError, match=rf"rank {rank} \(pid \d+\) {how}") as caught:
        with within(FAILURE_WITHIN_S):
            trainer.fit(model, loader())
    assert (caught.value.error_index, caught.value.exit_code) == (rank, exit_code)
    assert isinstance(caught.value, torch.multiprocessing.ProcessExitedException)
    assert trainer.strategy.launcher.pids == []
    model.actions = {}
    assert_trains(trainer, model)


def test_a_worker_that_dies_leaves_no_process_that_loaded_its_data():
    children = psutil.Process().children(recursive=True)
    with pytest.raises(WorkerDiedError):
        make_trainer("ddp_fork_ext").fit(Acts({1: kill_itself}), loader(num_workers=1, persistent_workers=True))
    new = [child for child in psutil.Process().children(recursive=True) if child not in children]
    assert_gone(new, within_s=10)


@pytest.mark.parametrize("is_noticed", [True, False], ids=["long before the next", "just before the next"])
def test_a_worker_that_was_killed_between_stages_is_replaced(is_noticed):
    trainer = make_trainer("ddp_spawn_ext")
    model = MLP()
    trainer.fit(model, loader())
    workers = processes_of(trainer)
    workers[1].kill()
    if is_noticed:
        assert_gone(workers[1:], within_s=2)
    trainer.validate(model, loader(), verbose=False)
    assert not set(processes_of(trainer)) & set(workers)
    assert_gone(workers, within_s=2)
    trainer.fit_loop.max_epochs = 4
    assert_trains(trainer, model)


COMPUTES_IN_PARALLEL = """
    import torch
    from tests.support.models import MLP, loader, make_trainer

    class Sums(MLP):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) + 0 * torch.ones(1 << 22).sum()

    torch.ones(1 << 22).sum()  # with threads that a fork does not have
    make_trainer("ddp_fork_ext", devices=1, max_steps=2).fit(Sums(), loader())
    print("trained")
"""


def test_a_forked_worker_can_compute_after_the_main_process_has(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(COMPUTES_IN_PARALLEL))
    assert "trained" in run_script(script).stdout


# --- what the main process has after a failure ---


@pytest.mark.parametrize(
    ("actions", "error"),
    [({0: raise_value_error}, "WorkerRaisedError"), ({1: raise_value_error}, "WorkerRaisedError"),
     ({1: kill_itself}, "WorkerDiedError")],
)  # fmt: skip
def test_on_exception_finds_the_state_of_the_failed_training(tmp_path, actions, error):
    model = Acts(actions)
    initial = state_of(model)
    sees, checkpoint = SeesException(), OnExceptionCheckpoint(tmp_path)
    trainer = make_trainer("ddp_spawn_ext", enable_checkpointing=True, callbacks=[sees, checkpoint])
    with pytest.raises((WorkerRaisedError, WorkerDiedError)):
        trainer.fit(model, loader())
    assert sees.seen == [(error, STEPS_BEFORE_FAILURE)]
    assert trainer.global_step == STEPS_BEFORE_FAILURE
    assert trainer.interrupted
    assert differs(model, initial)
    saved = torch.load(checkpoint.ckpt_path, weights_only=True)
    assert saved["global_step"] == STEPS_BEFORE_FAILURE
    assert not differs(model, saved["state_dict"])
    assert saved["optimizer_states"][0]["state"]


# --- what cannot be sent ---


def unpicklable(part: str) -> tuple[MLP, DataLoader, Callable[[str], Trainer]]:
    model, data, callback = MLP(), loader(), SeesException()
    holder = {"LightningModule": model, "callback": callback, "dataset": data.dataset}[part]
    holder.transform = threading.Lock()

    def trainer_for(strategy: str) -> Trainer:
        return make_trainer(strategy, callbacks=[callback])

    return model, data, trainer_for


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("LightningModule", "`transform` of the LightningModule MLP"),
        ("callback", "`transform` of the callback SeesException"),
        ("dataset", r"`dataset\.transform` of the argument DataLoader"),
    ],
)
def test_what_cannot_be_sent_is_named_before_a_process_starts_and_can_be_forked(part, name):
    model, data, trainer_for = unpicklable(part)
    trainer = trainer_for("ddp_spawn_ext")
    children = psutil.Process().children(recursive=True)  # those of an earlier test may end meanwhile
    with pytest.raises(TypeError, match=rf"{name} cannot be sent to the worker processes: .*lock(?s:.*)ddp_fork_ext"):
        trainer.fit(model, data)
    assert trainer.strategy.launcher.pids == []
    assert set(psutil.Process().children(recursive=True)) <= set(children)
    before = state_of(model)
    trainer = trainer_for("ddp_fork_ext")
    trainer.fit(model, data)
    assert trainer.global_step == 16
    assert differs(model, before)

"""The promises of ``ddp_spawn_ext`` when something goes wrong: one exception that says what, and nothing left behind.

A worker raises, hangs or dies; the user presses Ctrl-C; the main process is killed; a script or a notebook does what
cannot work. The main process is pytest's own where that is enough, and a script where its end is part of the promise.
"""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.nn import Module
from torch.utils.data import DataLoader

from lightning_strategies_ext import DDPSpawnStrategy, WorkerDiedError, WorkerRaisedError
from tests.models import MLP, loader, make_trainer, state_of
from tests.ranks import REPOSITORY, clean_environment, kill_tree, run_script

STEPS_BEFORE_FAILURE = 3
# What is promised is 10 seconds; the rest is for a machine that does other things as well.
FAILURE_WITHIN_S = 15
FOREVER_S = 60
LONG_FIT = {"max_epochs": -1, "max_steps": 100_000}


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


class Slow(MLP):
    """Leaves a file per rank at its fourth step; goes on for as long as it is let, or hangs there on some ranks."""

    def __init__(self, directory: Path, hanging: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.directory = directory
        self.hanging = hanging

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        if self.global_step == STEPS_BEFORE_FAILURE:
            (self.directory / f"training{self.global_rank}").touch()
            if self.global_rank in self.hanging:
                hang()
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
    with pytest.raises(WorkerRaisedError) as caught, within(FAILURE_WITHIN_S + 15 * (start_method == "spawn")):
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
        ("forkserver", 1, exit_at_once, 3, "ended with exit code 3"),
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
    from tests.models import MLP, loader, make_trainer

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
    assert "trained" in run_script(script, timeout_s=60).stdout


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
    holder.transform = lambda x: x

    def trainer_for(strategy: str) -> Trainer:
        return make_trainer(strategy, callbacks=[callback])

    return model, data, trainer_for


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("LightningModule", "The LightningModule MLP"),
        ("callback", "The callback SeesException"),
        ("dataset", r"The .*(DataLoader|dataset|TensorDataset)"),
    ],
)
def test_what_cannot_be_sent_is_named_before_a_process_starts_and_can_be_forked(part, name):
    model, data, trainer_for = unpicklable(part)
    trainer = trainer_for("ddp_spawn_ext")
    children = psutil.Process().children(recursive=True)
    with pytest.raises(TypeError, match=rf"{name} cannot be sent to the worker processes: .*lambda(?s:.*)ddp_fork_ext"):
        trainer.fit(model, data)
    assert trainer.strategy.launcher.pids == []
    assert psutil.Process().children(recursive=True) == children
    before = state_of(model)
    trainer = trainer_for("ddp_fork_ext")
    trainer.fit(model, data)
    assert trainer.global_step == 16
    assert differs(model, before)


# --- scripts ---

SCRIPT = """
import sys
from pathlib import Path

from tests import test_worker_failures

if __name__ == "__main__":
    getattr(test_worker_failures, sys.argv[1])(*sys.argv[2:])
"""

FAILS_TWICE = """
from pathlib import Path

from lightning_strategies_ext import WorkerRaisedError
from tests.models import MLP, loader, make_trainer

is_broken = Path(__file__).with_name("is_broken")
if __name__ == "__mp_main__" and is_broken.exists():
    import no_such_module


class MyError(Exception):
    pass


class Fails(MLP):
    def training_step(self, batch, batch_idx):
        raise MyError(self.global_rank)


if __name__ == "__main__":
    trainer = make_trainer("ddp_spawn_ext")
    try:
        trainer.fit(Fails(), loader())
    except WorkerRaisedError as error:
        print("has its own class:", isinstance(error.__cause__, MyError))
    is_broken.touch()
    trainer.fit(MLP(), loader())
"""

NO_GUARD = """
from lightning_strategies_ext import DDPSpawnStrategy
from lightning_strategies_ext import WorkerRaisedError
from tests.models import MLP, loader, make_trainer

for start_method in ("forkserver", "spawn"):
    try:
        make_trainer(DDPSpawnStrategy(start_method=start_method)).fit(MLP(), loader())
    except WorkerRaisedError as error:
        print(start_method, "said:", str(error).splitlines()[0])
"""

NOTEBOOK = """
import sys

sys.ps1 = ">>> "  # by which Lightning knows a notebook or a prompt

from tests.models import MLP, loader, make_trainer, state_of


class Doubled(MLP):
    factor = 2

    def training_step(self, batch, batch_idx):
        self.log("factor", float(self.factor))
        return self.factor * super().training_step(batch, batch_idx)


try:
    make_trainer("ddp_spawn_ext")
except Exception as error:
    print("refused:", type(error).__name__, error)

trainer = make_trainer("ddp_notebook_ext", max_epochs=1)
first = Doubled()
weights = state_of(first)
trainer.fit(first, loader())
print("trained:", trainer.global_step, trainer.callback_metrics["factor"].item())
assert any((tensor != weights[name]).any() for name, tensor in first.state_dict().items())

exec("class Tripled(Doubled):\\n    factor = 3", globals())
trainer.fit_loop.max_epochs = 2
second = Tripled()
trainer.fit(second, loader())
print("trained:", trainer.global_step, trainer.callback_metrics["factor"].item())
"""


class Run:
    """A script in the hands of a user, in a session of its own as in a terminal."""

    def __init__(self, directory: Path, what: Callable[..., None], *args: Any) -> None:
        script = directory / "script.py"
        script.write_text(SCRIPT)
        self.directory = directory
        self.temporary = directory / "temporary"
        self.temporary.mkdir()
        self.output = directory / "output.txt"
        environment = {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(script), what.__name__, *map(str, args)],
                env={**clean_environment(), **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._known: list[psutil.Process] = []

    def wait_for(self, *names: str, timeout_s: float = 60) -> None:
        """Waits until files of these names are there."""
        deadline = time.monotonic() + timeout_s
        while missing := [name for name in names if not (self.directory / name).exists()]:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, f"{missing} after {timeout_s} s:\n{self.output.read_text()}"
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        """All that the script has started and that runs now."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self._known += found
        return found

    def temporary_files(self) -> list[str]:
        """What is in the directory for temporary files, but for the cache that `import torch` may make."""
        return [name for name in os.listdir(self.temporary) if not name.startswith("torchinductor")]

    def end(self, timeout_s: float = 60) -> str:
        """Waits for the script to end by itself and returns what it has written."""
        try:
            exit_code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output.read_text()}") from None
        assert exit_code == 0, self.output.read_text()
        return self.output.read_text()

    def stop(self) -> None:
        for process in self._known:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        kill_tree(self.process.pid)
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts a script that does one of the functions here, and stops what is left of it after the test."""
    runs = []

    def start(what: Callable[..., None], *args: Any) -> Run:
        runs.append(Run(tmp_path, what, *args))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()


@pytest.fixture
def run_text(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script that is given as text."""

    def run(text: str, *args: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(text)
        return run_script(script, *args, timeout_s=60)

    return run


def test_an_exception_of_a_class_of_the_script_is_the_cause_and_a_failing_import_is_named(run_text):
    result = run_text(FAILS_TWICE)
    assert "has its own class: True" in result.stdout
    assert result.returncode == 1
    assert "failed: ModuleNotFoundError: No module named 'no_such_module'" in result.stdout
    assert "    import no_such_module\n" in result.stdout


def test_a_script_without_a_guard_fails_and_is_told_to_have_one(run_text):
    result = run_text(NO_GUARD)
    for start_method in ("forkserver", "spawn"):
        (said,) = [line for line in result.stdout.splitlines() if line.startswith(f"{start_method} said:")]
        assert 'Put what the script does under `if __name__ == "__main__":`' in said


def test_a_notebook_is_told_which_strategy_works_and_that_one_knows_what_was_just_defined(run_text):
    result = run_text(NOTEBOOK)
    assert result.returncode == 0, result.stdout
    (refused,) = [line for line in result.stdout.splitlines() if line.startswith("refused:")]
    assert "ddp_notebook_ext" in refused
    trained = [line for line in result.stdout.splitlines() if line.startswith("trained:")]
    assert trained == ["trained: 8 2.0", "trained: 16 3.0"]


# --- nothing is left ---


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_workers_end_with_their_trainer(start_method):
    trainer = spawning(start_method, max_epochs=1)
    model = MLP()
    trainer.fit(model, loader())
    workers = processes_of(trainer)
    assert len(workers) == 2
    assert all(map(is_alive, workers))
    del trainer, model
    gc.collect()
    assert_gone(workers, within_s=5)


def test_no_descriptor_of_the_main_process_is_left_by_a_stage_a_trainer_or_a_failure():
    trainer = make_trainer("ddp_spawn_ext", max_epochs=1)
    model = Acts({})
    numbers = []
    for stage in range(6):
        trainer.fit_loop.max_epochs = stage + 1
        trainer.fit(model, loader())
        numbers.append(num_descriptors())
    assert len(set(numbers[1:])) == 1, numbers
    numbers = []
    for _ in range(3):
        with pytest.raises(WorkerRaisedError):
            make_trainer("ddp_spawn_ext").fit(Acts({1: raise_value_error}), loader())
        gc.collect()
        numbers.append(num_descriptors())
    assert len(set(numbers[1:])) == 1, numbers


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def fit_and_wait(directory: str) -> None:
    trainers = [spawning(start_method, max_epochs=1) for start_method in ("forkserver", "fork")]
    for trainer in trainers:
        trainer.fit(MLP(), loader(num_workers=1, persistent_workers=True))
    let_the_test_look(directory)


def fail_and_wait(directory: str) -> None:
    with pytest.raises(WorkerRaisedError):
        make_trainer("ddp_fork_ext").fit(Acts({1: raise_value_error}), loader(num_workers=1, persistent_workers=True))
    let_the_test_look(directory)


def let_the_test_look(directory: str) -> None:
    Path(directory, "here").touch()
    while not Path(directory, "seen").exists():
        time.sleep(0.02)


# Two workers each, and the server that some were forked from; after a failure, nothing is there at all.
@pytest.mark.parametrize(("what", "num_processes"), [(fit_and_wait, 5), (fail_and_wait, 0)])
def test_nothing_is_left_when_a_script_has_ended(start, tmp_path, what, num_processes):
    files = shared_memory()
    run = start(what, tmp_path)
    run.wait_for("here")
    processes = run.processes()
    assert len(processes) >= num_processes
    assert processes == [] or num_processes > 0
    (tmp_path / "seen").touch()
    output = run.end(timeout_s=10)
    assert_gone(processes, within_s=1)
    assert "leaked" not in output
    assert run.temporary_files() == []
    assert_only_in_use(shared_memory() - files)


def train_while_others_are_idle(directory: str, training: str, *idle: str) -> None:
    trainers = [spawning(start_method, max_epochs=1) for start_method in idle]
    for trainer in trainers:
        trainer.fit(MLP(), loader(num_workers=1, persistent_workers=True))
    spawning(training, **LONG_FIT).fit(Slow(Path(directory)), loader(num_workers=1, persistent_workers=True))


@pytest.mark.parametrize(
    ("training", "idle"), [("forkserver", ("fork", "forkserver")), ("fork", ()), ("spawn", ("fork",))]
)
def test_nothing_is_left_when_the_main_process_is_killed(start, tmp_path, training, idle):
    files = shared_memory()
    run = start(train_while_others_are_idle, tmp_path, training, *idle)
    run.wait_for("training0", "training1")
    processes = run.processes()
    assert len(processes) >= 4 + 2 * len(idle)  # those that train, what loads their data, and the idle ones
    # It stays as a zombie, as it does where the program that has started it does not look after it at once.
    os.kill(run.process.pid, signal.SIGKILL)
    assert_gone(processes, within_s=10)
    assert run.process.wait() == -signal.SIGKILL
    assert run.temporary_files() == []
    assert_only_in_use(shared_memory() - files)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def assert_only_in_use(names: set[str]) -> None:
    """Fails if a file in /dev/shm is there that no process maps: that of a running one is not what was left here."""
    deadline = time.monotonic() + 5
    while left := [name for name in names & shared_memory() if not is_mapped(f"/dev/shm/{name}")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def is_mapped(path: str) -> bool:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if path in Path(f"/proc/{process.pid}/maps").read_text():
                return True
    return False


# --- Ctrl-C ---


@contextmanager
def ctrl_c_once(directory: Path, *more_after_s: float) -> Iterator[list[float]]:
    """Sends SIGINT to this process when both ranks train, and again after some time; yields the times at which."""
    times: list[float] = []
    is_over = threading.Event()

    def press() -> None:
        deadline = time.monotonic() + 60
        while not all((directory / f"training{rank}").exists() for rank in range(2)):
            if is_over.wait(0.02) or time.monotonic() > deadline:
                return
        for pause in (0.1, *more_after_s):
            if is_over.wait(pause):
                return
            times.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    try:
        yield times
    finally:
        is_over.set()
        thread.join()
        signal.signal(signal.SIGINT, handler)  # Lightning ignores it once it has seen one


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_ctrl_c_stops_all_ranks_and_what_they_have_done_is_here(tmp_path, start_method):
    model = Slow(tmp_path)
    initial = state_of(model)
    sees = SeesException()
    trainer = spawning(start_method, callbacks=[sees, NotesWorkers(tmp_path)], **LONG_FIT)
    with ctrl_c_once(tmp_path) as times, pytest.raises(SystemExit):
        trainer.fit(model, loader())
    assert time.monotonic() - times[0] < 5
    assert trainer.global_step > STEPS_BEFORE_FAILURE
    assert trainer.interrupted
    assert differs(model, initial)
    assert sees.seen == [("KeyboardInterrupt", trainer.global_step)]
    assert_no_worker_is_left(trainer, tmp_path)


class NotesWorkers(Callback):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_start(self, trainer, pl_module):
        (self.directory / f"pid{trainer.global_rank}").write_text(str(os.getpid()))


def assert_no_worker_is_left(trainer: Trainer, directory: Path) -> None:
    assert trainer.strategy.launcher.pids == []
    pids = [int((directory / f"pid{rank}").read_text()) for rank in range(2)]
    assert os.getpid() not in pids
    assert_gone([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], within_s=2)


def test_ctrl_c_ends_a_worker_that_hangs_and_says_that_its_state_is_lost(tmp_path, caplog):
    trainer = make_trainer("ddp_spawn_ext", callbacks=[NotesWorkers(tmp_path)], **LONG_FIT)
    with ctrl_c_once(tmp_path) as times, pytest.raises(SystemExit):
        trainer.fit(Slow(tmp_path, hanging=(1,)), loader())
    assert time.monotonic() - times[0] < 15
    assert "the state of this stage is lost" in caplog.text
    assert_no_worker_is_left(trainer, tmp_path)


def test_a_second_ctrl_c_does_not_wait_for_a_worker_that_hangs(tmp_path, caplog):
    trainer = make_trainer("ddp_spawn_ext", callbacks=[NotesWorkers(tmp_path)], **LONG_FIT)
    with ctrl_c_once(tmp_path, 0.5) as times, pytest.raises(SystemExit):
        trainer.fit(Slow(tmp_path, hanging=(0, 1)), loader())
    assert len(times) == 2
    assert time.monotonic() - times[1] < 2
    assert "the state of this stage is lost" in caplog.text
    assert_no_worker_is_left(trainer, tmp_path)


def press_ctrl_c_while_workers_start_and_then_while_they_train(directory: str) -> None:
    sees = SeesException()
    model = Slow(Path(directory))
    initial = state_of(model)
    trainer = make_trainer("ddp_spawn_ext", callbacks=[sees], **LONG_FIT)
    for moment in ("starting", "again"):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        Path(directory, moment).touch()
        try:
            trainer.fit(model, loader(num_workers=1, persistent_workers=True))
        except SystemExit:
            print("stopped", moment, trainer.global_step, differs(model, initial), sees.seen[-1][0])
    Path(directory, "stopped").touch()
    time.sleep(1.5)  # for the test to see what is left while this process runs


def test_ctrl_c_of_a_terminal_reaches_all_processes_and_is_handled_once(start, tmp_path):
    run = start(press_ctrl_c_while_workers_start_and_then_while_they_train, tmp_path)
    run.wait_for("starting")
    time.sleep(1.0)
    os.killpg(run.process.pid, signal.SIGINT)
    run.wait_for("again")
    run.wait_for("training0", "training1")
    time.sleep(0.2)
    workers = [process for process in run.processes() if "fork_server" not in " ".join(process.cmdline())]
    before = time.monotonic()
    os.killpg(run.process.pid, signal.SIGINT)
    run.wait_for("stopped", timeout_s=15)
    assert time.monotonic() - before < 8, run.output.read_text()
    assert_gone(workers, within_s=1)
    output = run.end()
    first, second = [line.split()[1:] for line in output.splitlines() if line.startswith("stopped")]
    assert first == ["starting", "0", "False", "KeyboardInterrupt"]
    assert second[0] == "again"
    assert int(second[1]) > STEPS_BEFORE_FAILURE
    assert second[2:] == ["True", "KeyboardInterrupt"]
    assert "Traceback" not in output

"""How ``ddp_spawn_ext`` ends: nothing is left of a Trainer, a script or a killed main process, and Ctrl-C stops all.

The main process is pytest's own where that is enough, and a script where its end is part of the promise.
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch import Callback, Trainer

from lightning_strategies_ext import WorkerRaisedError
from tests.launch.test_worker_failures import (
    STEPS_BEFORE_FAILURE,
    Acts,
    SeesException,
    assert_gone,
    differs,
    hang,
    is_alive,
    processes_of,
    raise_value_error,
    spawning,
)
from tests.support.models import MLP, loader, make_trainer, state_of
from tests.support.ranks import REPOSITORY, clean_environment, kill_tree
from tests.support.shared_memory import PrivateSharedMemory, private_shared_memory

pytestmark = pytest.mark.processes

LONG_FIT = {"max_epochs": -1, "max_steps": 100_000}


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


SCRIPT = """
import sys
from pathlib import Path

from tests.launch import test_worker_failures_endings

if __name__ == "__main__":
    getattr(test_worker_failures_endings, sys.argv[1])(*sys.argv[2:])
"""


class Run:
    """A script in the hands of a user, in a session of its own as in a terminal."""

    def __init__(self, prefix: list[str], directory: Path, what: Callable[..., None], *args: Any) -> None:
        script = directory / "script.py"
        script.write_text(SCRIPT)
        self.directory = directory
        self.temporary = Path(tempfile.mkdtemp(prefix="t"))  # short: the paths of sockets in it may have 107 characters
        self.output = directory / "output.txt"
        environment = {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, str(script), what.__name__, *map(str, args)],
                env={**clean_environment(), **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._known: list[psutil.Process] = []

    def wait_for(self, *names: str, timeout_s: float = 300) -> None:
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
        """What is in the directory for temporary files, but for what torch and Open MPI leave there themselves.

        `import torch` may make a cache and, in older torch, a directory with a generated module that stays if a process
        is killed. Lightning before 2.6 initializes MPI to detect it.
        """
        names = [path.name for path in self.temporary.iterdir() if [*path.glob("_remote_module*")] == []]
        return [name for name in names if not name.startswith(("torchinductor", "ompi."))]

    def wait_for_no_temporary_files(self, but: str | None = None, timeout_s: float = 60) -> None:
        """Waits until nothing is there, but for names that begin so: processes may still be cleaning up."""
        deadline = time.monotonic() + timeout_s
        while left := [name for name in self.temporary_files() if but is None or not name.startswith(but)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def end(self, timeout_s: float = 300) -> str:
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
        shutil.rmtree(self.temporary, ignore_errors=True)


@pytest.fixture
def shared_memory() -> Iterator[PrivateSharedMemory]:
    """A /dev/shm that only the test's processes use."""
    with private_shared_memory() as shared_memory:
        yield shared_memory


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    """Starts a script that does one of the functions here, and stops what is left of it after the test."""
    is_private = "shared_memory" in request.fixturenames
    prefix = request.getfixturevalue("shared_memory").prefix if is_private else []
    runs = []

    def start(what: Callable[..., None], *args: Any) -> Run:
        runs.append(Run(prefix, tmp_path, what, *args))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()


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


# The two workers of the last, and the server that others were forked from; after a failure, nothing is there at all.
@pytest.mark.parametrize(("what", "num_processes"), [(fit_and_wait, 3), (fail_and_wait, 0)])
def test_nothing_is_left_when_a_script_has_ended(start, tmp_path, shared_memory, what, num_processes):
    run = start(what, tmp_path)
    run.wait_for("here")
    processes = run.processes()
    assert len(processes) >= num_processes
    assert processes == [] or num_processes > 0
    (tmp_path / "seen").touch()
    output = run.end(timeout_s=10)
    assert_gone(processes, within_s=1)
    assert "leaked" not in output
    run.wait_for_no_temporary_files()
    shared_memory.wait_until_empty()


def train_after_others(directory: str, training: str, *before: str) -> None:
    trainers = [spawning(start_method, max_epochs=1) for start_method in before]
    for trainer in trainers:
        trainer.fit(MLP(), loader(num_workers=1, persistent_workers=True))
    spawning(training, **LONG_FIT).fit(Slow(Path(directory)), loader(num_workers=1, persistent_workers=True))


@pytest.mark.parametrize(
    ("training", "before"), [("forkserver", ("fork", "forkserver")), ("fork", ()), ("spawn", ("fork",))]
)
def test_nothing_is_left_when_the_main_process_is_killed(start, tmp_path, shared_memory, training, before):
    run = start(train_after_others, tmp_path, training, *before)
    run.wait_for("training0", "training1")
    processes = run.processes()
    assert len(processes) >= 4  # those that train, and what loads their data
    # It stays as a zombie, as it does where the program that has started it does not look after it at once.
    os.kill(run.process.pid, signal.SIGKILL)
    assert_gone(processes, within_s=10)
    assert run.process.wait() == -signal.SIGKILL
    # Now and then the directory of a dataloader worker's socket stays. What ends that worker was not found; torch's
    # handler of SIGTERM (2.13) would end it so, without Python's own cleaning up.
    run.wait_for_no_temporary_files(but="pymp-")
    shared_memory.wait_until_empty()


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

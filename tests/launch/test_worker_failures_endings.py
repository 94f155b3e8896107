"""Exits of ``ddp_spawn_ext``: a Trainer, a script, and a killed main process leave nothing, and Ctrl-C stops all ranks.

The main process is pytest's process, or a script if the test concerns its exit.
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
    RecordsExceptions,
    assert_exited,
    differs,
    hang,
    is_running,
    processes_of,
    raise_value_error,
    spawning,
)
from tests.support.models import MLP, loader, make_trainer, state_of
from tests.support.private_dev_shm import PrivateSharedMemory, private_shared_memory
from tests.support.ranks import REPOSITORY, clean_environment, kill_tree

pytestmark = pytest.mark.processes

LONG_FIT = {"max_epochs": -1, "max_steps": 100_000}


class Slow(MLP):
    """A model that creates a file per rank at its fourth step, and then hangs on some ranks. Other ranks continue."""

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
    """A user's script in a new session, as in a terminal."""

    def __init__(self, prefix: list[str], directory: Path, function: Callable[..., None], *args: Any) -> None:
        script = directory / "script.py"
        script.write_text(SCRIPT)
        self.directory = directory
        self.temporary = Path(tempfile.mkdtemp(prefix="t"))  # short: the paths of sockets in it may have 107 characters
        self.output = directory / "output.txt"
        environment = {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, str(script), function.__name__, *map(str, args)],
                env={**clean_environment(), **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._known: list[psutil.Process] = []

    def wait_for(self, *names: str, timeout_s: float = 300) -> None:
        """Waits until files with these names exist."""
        deadline = time.monotonic() + timeout_s
        while missing := [name for name in names if not (self.directory / name).exists()]:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, f"{missing} after {timeout_s} s:\n{self.output.read_text()}"
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        """Returns the running processes that the script has started."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self._known += found
        return found

    def temporary_files(self) -> list[str]:
        """Returns the names of temporary files, except files that torch and Open MPI leave.

        `import torch` may create a cache and, in older torch, a directory with a generated module that stays if a
        process is killed. Lightning before 2.6 initializes MPI to detect it.
        """
        names = [path.name for path in self.temporary.iterdir() if [*path.glob("_remote_module*")] == []]
        return [name for name in names if not name.startswith(("torchinductor", "ompi."))]

    def wait_for_no_temporary_files(self, ignored: str | None = None, timeout_s: float = 60) -> None:
        """Waits until no temporary files are left, except names that begin with ``ignored``: exits may take time."""
        deadline = time.monotonic() + timeout_s
        while names := [name for name in self.temporary_files() if ignored is None or not name.startswith(ignored)]:
            assert time.monotonic() < deadline, names
            time.sleep(0.1)

    def end(self, timeout_s: float = 300) -> str:
        """Waits until the script exits by itself, and returns its output."""
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
    """Provides a /dev/shm that only the test's processes use."""
    with private_shared_memory() as shared_memory:
        yield shared_memory


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    """Starts a script that runs a function of this module, and kills its remaining processes after the test."""
    is_private = "shared_memory" in request.fixturenames
    prefix = request.getfixturevalue("shared_memory").prefix if is_private else []
    runs = []

    def start(function: Callable[..., None], *args: Any) -> Run:
        runs.append(Run(prefix, tmp_path, function, *args))
        return runs[-1]

    yield start
    for run in runs:
        run.stop()


# --- no remaining processes and files ---


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_workers_exit_with_their_trainer(start_method):
    trainer = spawning(start_method, max_epochs=1)
    model = MLP()
    trainer.fit(model, loader())
    workers = processes_of(trainer)
    assert len(workers) == 2
    assert all(map(is_running, workers))
    del trainer, model
    gc.collect()
    assert_exited(workers, within_s=5)


def test_stages_trainers_and_failures_leave_no_descriptor_in_the_main_process():
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
    wait_for_the_test(directory)


def fail_and_wait(directory: str) -> None:
    with pytest.raises(WorkerRaisedError):
        make_trainer("ddp_fork_ext").fit(Acts({1: raise_value_error}), loader(num_workers=1, persistent_workers=True))
    wait_for_the_test(directory)


def wait_for_the_test(directory: str) -> None:
    Path(directory, "ready").touch()
    while not Path(directory, "inspected").exists():
        time.sleep(0.02)


# The two workers of the last Trainer, and the fork server; after a failure, there are no processes.
@pytest.mark.parametrize(("function", "num_processes"), [(fit_and_wait, 3), (fail_and_wait, 0)])
def test_no_process_remains_after_a_script_has_exited(start, tmp_path, shared_memory, function, num_processes):
    run = start(function, tmp_path)
    run.wait_for("ready")
    processes = run.processes()
    assert len(processes) >= num_processes
    assert processes == [] or num_processes > 0
    (tmp_path / "inspected").touch()
    output = run.end(timeout_s=60)  # on a busy machine, the end of two workers has taken more than ten seconds
    assert_exited(processes, within_s=1)
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
def test_no_process_remains_after_the_main_process_is_killed(start, tmp_path, shared_memory, training, before):
    run = start(train_after_others, tmp_path, training, *before)
    run.wait_for("training0", "training1")
    processes = run.processes()
    assert len(processes) >= 4  # two workers and their DataLoader workers
    # The process remains a zombie, as if its parent does not wait for it immediately.
    os.kill(run.process.pid, signal.SIGKILL)
    assert_exited(processes, within_s=10)
    assert run.process.wait() == -signal.SIGKILL
    # Sometimes the directory of a DataLoader worker's socket is left. The cause of that worker's exit is unknown;
    # torch's handler of SIGTERM (2.13) would exit without Python's cleanup.
    run.wait_for_no_temporary_files(ignored="pymp-")
    shared_memory.wait_until_empty()


# --- Ctrl-C ---


@contextmanager
def ctrl_c_once(directory: Path, *more_after_s: float) -> Iterator[list[float]]:
    """Sends SIGINT to this process when both ranks train, and again after the given seconds; yields the times."""
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
        signal.signal(signal.SIGINT, handler)  # Lightning ignores signals after the first signal


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_ctrl_c_stops_all_ranks_and_returns_their_state(tmp_path, start_method):
    model = Slow(tmp_path)
    initial = state_of(model)
    recorder = RecordsExceptions()
    trainer = spawning(start_method, callbacks=[recorder, RecordsPids(tmp_path)], **LONG_FIT)
    with ctrl_c_once(tmp_path) as times, pytest.raises(SystemExit):
        trainer.fit(model, loader())
    assert time.monotonic() - times[0] < 5
    assert trainer.global_step > STEPS_BEFORE_FAILURE
    assert trainer.interrupted
    assert differs(model, initial)
    assert recorder.exceptions == [("KeyboardInterrupt", trainer.global_step)]
    assert_no_worker_remains(trainer, tmp_path)


class RecordsPids(Callback):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_start(self, trainer, pl_module):
        (self.directory / f"pid{trainer.global_rank}").write_text(str(os.getpid()))


def assert_no_worker_remains(trainer: Trainer, directory: Path) -> None:
    assert trainer.strategy.launcher.pids == []
    pids = [int((directory / f"pid{rank}").read_text()) for rank in range(2)]
    assert os.getpid() not in pids
    assert_exited([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], within_s=2)


def test_ctrl_c_kills_a_hung_worker_and_reports_that_its_state_is_lost(tmp_path, caplog):
    trainer = make_trainer("ddp_spawn_ext", callbacks=[RecordsPids(tmp_path)], **LONG_FIT)
    with ctrl_c_once(tmp_path) as times, pytest.raises(SystemExit):
        trainer.fit(Slow(tmp_path, hanging=(1,)), loader())
    assert time.monotonic() - times[0] < 15
    assert "the state of this stage is lost" in caplog.text
    assert_no_worker_remains(trainer, tmp_path)


def test_a_second_ctrl_c_does_not_wait_for_a_hung_worker(tmp_path, caplog):
    trainer = make_trainer("ddp_spawn_ext", callbacks=[RecordsPids(tmp_path)], **LONG_FIT)
    with ctrl_c_once(tmp_path, 0.5) as times, pytest.raises(SystemExit):
        trainer.fit(Slow(tmp_path, hanging=(0, 1)), loader())
    assert len(times) == 2
    assert time.monotonic() - times[1] < 2
    assert "the state of this stage is lost" in caplog.text
    assert_no_worker_remains(trainer, tmp_path)


def train_until_ctrl_c_twice(directory: str) -> None:
    recorder = RecordsExceptions()
    model = Slow(Path(directory))
    initial = state_of(model)
    trainer = make_trainer("ddp_spawn_ext", callbacks=[recorder], **LONG_FIT)
    for moment in ("starting", "again"):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        Path(directory, moment).touch()
        try:
            trainer.fit(model, loader(num_workers=1, persistent_workers=True))
        except SystemExit:
            print("stopped", moment, trainer.global_step, differs(model, initial), recorder.exceptions[-1][0])
    Path(directory, "stopped").touch()
    time.sleep(1.5)  # for the test to check remaining processes and files while this process runs


def test_ctrl_c_of_a_terminal_reaches_all_processes_and_is_handled_once(start, tmp_path):
    run = start(train_until_ctrl_c_twice, tmp_path)
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
    assert_exited(workers, within_s=1)
    output = run.end()
    first, second = [line.split()[1:] for line in output.splitlines() if line.startswith("stopped")]
    assert first == ["starting", "0", "False", "KeyboardInterrupt"]
    assert second[0] == "again"
    assert int(second[1]) > STEPS_BEFORE_FAILURE
    assert second[2:] == ["True", "KeyboardInterrupt"]
    assert "Traceback" not in output

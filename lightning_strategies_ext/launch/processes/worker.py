"""What runs in a worker process: it waits for jobs from the main process, runs them, and hands over their results.

A worker serves one pool. It ends when the pool says so, when a job fails, and when the main process is gone, however
that happened.
"""

import atexit
import gc
import multiprocessing.spawn
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import psutil
import torch

from lightning_strategies_ext.launch.transport.channel import Channel, Envelope
from lightning_strategies_ext.launch.transport.messages import Pickled, dump

#: How often a worker looks whether the main process is alive, in seconds.
PARENT_POLL_S = 0.5

_is_importing_main = False


class Job(Protocol):
    """What a worker runs. It is pickled in the main process."""

    def run(self, place: "Place", envelope: Envelope) -> Iterator[Any]:
        """Runs the job and returns what the main process may pull of its results, one after the other.

        Raises:
            JobFailedError: If it fails.
        """


class JobFailedError(Exception):
    """A job failed; its ``__cause__`` is the exception.

    Args:
        clean_up: What is left to do. The failure is reported first: this may take long.
        results: What the main process may pull nevertheless, or None.
    """

    def __init__(self, clean_up: Callable[[], None], results: Iterator[Any] | None) -> None:
        super().__init__()
        self.clean_up = clean_up
        self.results = results


@dataclass
class Start:
    """The first message to a worker: what makes it like the main process.

    Attributes:
        preparation: As ``multiprocessing.spawn.get_preparation_data`` gives it; None in a forked worker.
    """

    local_rank: int
    preparation: dict[str, Any] | None


@dataclass
class Conditions:
    """The state of the main process's globals that a job sees too, as they are when the job is sent."""

    directory: str
    environment: dict[str, str]
    rng: "RngState"
    num_threads: int
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    is_deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    only_warns: bool = field(default_factory=torch.is_deterministic_algorithms_warn_only_enabled)
    cudnn_benchmark: bool = field(default_factory=lambda: bool(torch.backends.cudnn.benchmark))
    cudnn_deterministic: bool = field(default_factory=lambda: bool(torch.backends.cudnn.deterministic))
    matmul_precision: str = field(default_factory=torch.get_float32_matmul_precision)

    def apply(self) -> None:
        """Makes this process's globals so."""
        os.chdir(self.directory)
        for name in set(os.environ) - set(self.environment):
            del os.environ[name]
        os.environ.update(self.environment)
        torch.set_num_threads(self.num_threads)
        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.set_float32_matmul_precision(self.matmul_precision)
        self.rng.apply()


@dataclass
class RngState:
    """The states of Python's, NumPy's and torch's generators; of the GPU of this rank too where one is in use."""

    python: Any
    numpy: Any
    torch_cpu: bytes
    torch_cuda: bytes | None

    @classmethod
    def now(cls) -> "RngState":
        """Those of this process."""
        cuda = bytes(torch.cuda.get_rng_state().numpy()) if torch.cuda.is_initialized() else None
        kind, keys, *rest = np.random.get_state(legacy=True)
        numpy = (kind, bytes(keys), *rest)  # type: ignore[arg-type]
        return cls(random.getstate(), numpy, bytes(torch.get_rng_state().numpy()), cuda)

    def is_same(self, other: "RngState") -> bool:
        """Whether the generators on the CPU have the same states."""
        return (self.python, self.numpy, self.torch_cpu) == (other.python, other.numpy, other.torch_cpu)

    def apply(self) -> None:
        """Sets this process's."""
        random.setstate(self.python)
        kind, keys, *rest = self.numpy
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch_cpu), dtype=torch.uint8))
        if self.torch_cuda is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(self.torch_cuda), dtype=torch.uint8))


@dataclass
class Order:
    """Tells a worker to run a job.

    Attributes:
        continues: Whether the job goes on where an earlier one ended.
        is_inherited: Whether the job is the one that the worker was forked with; otherwise the next message holds it.
    """

    conditions: Conditions
    continues: bool
    is_inherited: bool = False


class Ping:
    """Asks a worker whether it is there. The worker answers with the same."""


class Pull:
    """Asks a worker for the next of its job's results."""


@dataclass
class Save:
    """Asks a worker to write the state of its stage to a file, since it could not be pulled.

    The worker answers with a :class:`Done`, or a :class:`Failure`.
    """

    path: str


class End:
    """Tells a worker to end. Also the answer to a :class:`Pull` when there are no more results."""


@dataclass
class Done:
    """A worker's answer to a job: it has run."""

    rng: RngState


@dataclass
class Failure:
    """A worker's answer to a job: it has failed.

    Attributes:
        pickled: The exception, if it can be pickled; otherwise None.
        summary: Its class, and the first line of its message.
        trace: Its trace, as text.
        time: When, on the clock that all processes of a host share.
        has_results: Whether there are results to pull.
    """

    pickled: Pickled | None
    summary: str
    trace: str
    time: float
    has_results: bool

    @classmethod
    def of(cls, exception: BaseException, has_results: bool = False) -> "Failure":
        """Describes an exception that was caught."""
        trace = "".join(traceback.format_exception(exception))
        pickled = None
        with suppress(Exception):
            pickled = dump(exception, returning=True)
        summary = f"{type(exception).__qualname__}: {exception}".splitlines()[0]
        return cls(pickled, summary, trace, time.monotonic(), has_results)

    @property
    def exception(self) -> BaseException | None:
        """The exception, or None if it cannot be rebuilt here."""
        with suppress(Exception):
            loaded = None if self.pickled is None else self.pickled.load()
            return loaded if isinstance(loaded, BaseException) else None
        return None


class Place:
    """Which worker this is, and what outlives a job in it.

    Attributes:
        local_rank: Index among the workers of this host.
        continues: Whether the job goes on where an earlier one of this pool ended.
        is_running: Whether a job runs now.
        on_interrupt: What to do then on Ctrl-C instead of raising KeyboardInterrupt.
        save: Writes the state of the stage that ran to a file, until the next job.
    """

    def __init__(self, local_rank: int) -> None:
        self.local_rank = local_rank
        self.continues = False
        self.is_running = False
        self.on_interrupt: Callable[[], None] | None = None
        self.save: Callable[[str], None] | None = None


def is_importing_main() -> bool:
    """Whether this is a worker that is still importing the user's script."""
    return _is_importing_main


def serve(connected: socket.socket, main_pid: int, inherited: Job | None = None) -> None:
    """Runs a worker until it is told to end. Called in the worker process, once.

    Args:
        connected: This worker's end of its channel.
        main_pid: The main process.
        inherited: A job that a forked worker got by being forked.
    """
    die_with(main_pid)
    channel = Channel(connected)
    with suppress(EOFError, OSError):  # the main process closed its end: there is no one to tell
        _serve(channel, inherited)
    gc.collect()  # ends the workers of dataloaders in good order


@contextmanager
def own_exit_handlers() -> Generator[None, None, None]:
    """Runs what is registered with ``atexit`` in here, and nothing of the process that this one was forked from.

    A forked process ends without it, unless it is multiprocessing's of Python 3.14.
    """
    atexit._clear()
    try:
        yield
    finally:
        atexit._run_exitfuncs()


def _serve(channel: Channel, inherited: Job | None) -> None:
    start: Start = channel.receive()
    place = Place(start.local_rank)
    signal.signal(signal.SIGINT, lambda signum, frame: _interrupted(place))
    try:
        _prepare(start)
    except BaseException as exception:
        channel.send(Failure.of(exception))
        return
    gc.enable()
    gc.collect()
    gc.freeze()  # what is imported stays: the collection between jobs need not look at it
    envelope = Envelope(Pickled(b""))
    results: Iterator[Any] = iter(())
    result: Any
    while not isinstance(message := channel.receive(), End):
        if isinstance(message, Ping):
            channel.send(message)
            continue
        if isinstance(message, Save):
            channel.send(_save(message.path, place))
            continue
        if isinstance(message, Pull):
            try:
                result = next(results, End())
                channel.send(result)
            except Exception as exception:
                result = Failure.of(exception)
                channel.send(result)
            if not isinstance(result, (End, Failure)):
                continue
            results = iter(())
        else:
            place.save = None
            envelope.close()
            envelope = Envelope(Pickled(b"")) if message.is_inherited else channel.receive_envelope(private=True)
            try:
                results = _run(message, envelope, inherited, place)
                channel.send(Done(RngState.now()))
            except JobFailedError as failed:
                channel.send(Failure.of(failed.__cause__ or failed, has_results=failed.results is not None))
                failed.clean_up()
                if failed.results is None:
                    return
                results = failed.results
            except BaseException as exception:
                channel.send(Failure.of(exception))
                return
            inherited = None
        gc.collect()  # the trainer of a job that is over, with its memory and the workers of its dataloaders


def _save(path: str, place: Place) -> "Done | Failure":
    try:
        if place.save is None:
            raise RuntimeError("no stage of a Trainer has run here")
        place.save(path)
        return Done(RngState.now())
    except Exception as exception:
        return Failure.of(exception)


def _run(order: Order, envelope: Envelope, inherited: Job | None, place: Place) -> Iterator[Any]:
    order.conditions.apply()
    place.continues = order.continues
    place.is_running = True
    try:
        job: Job | None = inherited if order.is_inherited else envelope.open()
        assert job is not None
        return job.run(place, envelope)
    finally:
        envelope.found = {}  # it would keep the job's objects
        place.is_running = False
        place.on_interrupt = None


def _prepare(start: Start) -> None:
    global _is_importing_main
    if start.preparation is None:
        # Forked from a process whose OpenMP threads, if it had any, are not here: one would wait for them for ever.
        torch.set_num_threads(1)
        return
    _is_importing_main = True
    try:
        # Imports the user's script as `__mp_main__`, where its classes are looked up. `spawn.prepare` is what
        # multiprocessing calls in its own children (Python 3.10 to 3.14).
        multiprocessing.spawn.prepare(start.preparation)
    finally:
        _is_importing_main = False


def _interrupted(place: Place) -> None:
    if not place.is_running:
        return
    if place.on_interrupt is None:
        raise KeyboardInterrupt
    place.on_interrupt()


def die_with(pid: int) -> None:
    """Kills this process soon after process ``pid`` is gone, whatever it is doing then.

    The workers of its dataloaders notice within five seconds, and clean up behind them.
    """
    process = psutil.Process(pid)

    def watch() -> None:
        while is_running(process):
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lightning-strategies-ext parent watch").start()


def is_running(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked about does not."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def command(connected: socket.socket, main_pid: int) -> list[str]:
    """The command line that starts a worker in a Python of its own."""
    # Collecting garbage while modules are imported takes a sixth of the time and finds none.
    program = "import gc, socket; gc.disable(); from lightning_strategies_ext.launch import worker"
    program += f"; worker.serve(socket.socket(fileno={connected.fileno()}), {main_pid})"
    return [sys.executable, "-c", program]

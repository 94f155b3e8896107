"""What runs in a worker process: it waits for jobs from the main process, runs them, and hands over their results.

A worker serves one pool. It ends when the pool says so, when a job fails, and when the main process is gone, however
that happened.
"""

import atexit
import gc
import multiprocessing.spawn
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch

from lightning_strategies_ext._system.peers import is_running, start_time
from lightning_strategies_ext.interpreters import current_options, python
from lightning_strategies_ext.launch.processes.process_settings import RngState
from lightning_strategies_ext.launch.protocol import (
    JoinPending,
    Ping,
    PullResult,
    RunTask,
    SaveState,
    Shutdown,
    TaskDone,
    TaskFailed,
    WorkerSetup,
)
from lightning_strategies_ext.launch.transport import unreadable
from lightning_strategies_ext.launch.transport.channel import Channel, ReceivedMessage, TaskChannel
from lightning_strategies_ext.launch.transport.pickling import Pickled, use_remote_main

#: How often a worker looks whether the main process is alive, in seconds.
PARENT_POLL_S = 0.5
#: By which ``multiprocessing.spawn`` is told what to import in place of the user's ``__main__``.
MAIN_NAME, MAIN_PATH = "init_main_from_name", "init_main_from_path"

_is_importing_main = False


class WorkerTask(Protocol):
    """What a worker runs. It is pickled in the main process."""

    def run(self, state: "WorkerState", message: ReceivedMessage) -> Iterator[Any]:
        """Runs the job and returns what the main process may pull of its results, one after the other.

        Raises:
            TaskFailedError: If it fails.
        """


class TaskFailedError(Exception):
    """A job failed; its ``__cause__`` is the exception.

    Args:
        clean_up: What is left to do. The failure is reported first: this may take long.
        results: What the main process may pull nevertheless, or None.
    """

    def __init__(self, clean_up: Callable[[], None], results: Iterator[Any] | None) -> None:
        super().__init__()
        self.clean_up = clean_up
        self.results = results


class WorkerState:
    """Which worker this is, and what outlives a job in it.

    Attributes:
        rank: Index among the pool's workers.
        rank_info: See :class:`.WorkerSetup`.
        channel: To the main process, for a job whose ranks may change; None if there is none that a job may use.
        is_continuation: Whether the job goes on where an earlier one of this pool ended.
        is_joining: Whether the others are in the middle of the job.
        is_running: Whether a job runs now.
        on_interrupt: What to do then on Ctrl-C instead of raising KeyboardInterrupt.
        save: Writes the state of the stage that ran to a file, until the next job.
    """

    def __init__(self, start: WorkerSetup, channel: TaskChannel | None = None) -> None:
        self.rank = start.rank
        self.rank_info = start.rank_info
        self.channel = channel
        self.is_continuation = False
        self.is_joining = False
        self.is_running = False
        self.on_interrupt: Callable[[], None] | None = None
        self.save: Callable[[str], None] | None = None

    @property
    def local_rank(self) -> int:
        """Index among the workers of this host."""
        return self.rank if self.rank_info is None else self.rank_info.local_rank


def is_importing_main() -> bool:
    """Whether this is a worker that is still importing the user's script."""
    return _is_importing_main


def serve(connected: socket.socket, main_pid: int, inherited_task: WorkerTask | None = None) -> None:
    """Runs a worker until it is told to end. Called in the worker process, once.

    Args:
        connected: This worker's end of its channel.
        main_pid: The main process.
        inherited_task: A job that a forked worker got by being forked.
    """
    exit_with_parent(main_pid)
    channel = Channel(connected)
    with suppress(EOFError, OSError):  # the main process closed its end: there is no one to tell
        _serve(channel, inherited_task)
    gc.collect()  # ends the workers of dataloaders in good order


@contextmanager
def isolated_exit_handlers() -> Generator[None, None, None]:
    """Runs what is registered with ``atexit`` in here, and nothing of the process that this one was forked from.

    A forked process ends without it, unless it is multiprocessing's of Python 3.14.
    """
    atexit._clear()
    try:
        yield
    finally:
        atexit._run_exitfuncs()


def _serve(channel: Channel, inherited_task: WorkerTask | None) -> None:
    start: WorkerSetup = channel.receive()
    service = WorkerService(WorkerState(start, channel), inherited_task)
    failure = service.set_up(start)
    if failure is not None:
        channel.send(failure)
        return
    while not service.is_finished and not isinstance(message := channel.receive(), Shutdown):
        for reply in service.handle(message, partial(channel.receive_message, private=True)):
            try:
                channel.send(reply)
            except Exception as exception:  # pickle cannot take a result of the user's
                channel.send(service.fail_unsent_result(exception))


class WorkerService:
    """What a worker answers to the main process's messages, whatever carries them.

    Args:
        state: Of this worker.
        inherited_task: See :func:`serve`.

    Attributes:
        is_finished: Whether there is nothing more that this worker is good for.
    """

    def __init__(self, state: WorkerState, inherited_task: WorkerTask | None = None) -> None:
        self.is_finished = False
        self._state = state
        self._inherited_task = inherited_task
        self._task_message = ReceivedMessage(Pickled(b""))
        self._results: Iterator[Any] = iter(())

    def set_up(self, start: WorkerSetup) -> TaskFailed | None:
        """Makes this process ready for jobs; returns why that has failed, if it has."""
        signal.signal(signal.SIGINT, lambda signum, frame: _interrupted(self._state))
        try:
            _prepare(start)
        except BaseException as exception:
            return TaskFailed.of(exception)
        # What is here stays: the collection between jobs need not look at it, and one before this would write to all
        # pages that a forked worker shares with the process it was forked from.
        gc.freeze()
        gc.enable()
        return None

    def handle(self, message: Any, receive_task: Callable[[], ReceivedMessage]) -> Iterator[Any]:
        """What to answer; the caller exhausts it, for there may be something left to do after an answer.

        Args:
            message: The message, any but :class:`.Shutdown`.
            receive_task: Waits for the job that follows an :class:`.RunTask`.
        """
        if isinstance(message, Ping):
            yield message
        elif isinstance(message, JoinPending):
            pass  # it came when the job was over
        elif isinstance(message, SaveState):
            yield _save(message.path, self._state)
        elif isinstance(message, PullResult):
            yield self._next_result()
        else:
            yield from self._run(message, receive_task)
            gc.collect()  # the trainer of a job that is over, with its memory and the workers of its dataloaders

    def fail_unsent_result(self, exception: Exception) -> TaskFailed:
        """Called when a result could not be sent; what to send in its place. There are no more results then."""
        self._results = iter(())
        gc.collect()
        return TaskFailed.of(exception)

    def _next_result(self) -> Any:
        try:
            result = next(self._results, Shutdown())
        except Exception as exception:
            return self.fail_unsent_result(exception)
        if isinstance(result, Shutdown):
            self._results = iter(())
            gc.collect()
        return result

    def _run(self, order: RunTask, receive_task: Callable[[], ReceivedMessage]) -> Iterator[Any]:
        self._state.save = None
        self._results = iter(())
        self._task_message.close()
        self._task_message = ReceivedMessage(Pickled(b"")) if order.is_inherited else receive_task()
        try:
            self._results = _run(order, self._task_message, self._inherited_task, self._state)
            yield TaskDone(RngState.now())
        except TaskFailedError as failed:
            yield TaskFailed.of(failed.__cause__ or failed, has_results=failed.results is not None)
            failed.clean_up()
            if failed.results is None:
                self.is_finished = True
                return
            self._results = failed.results
        except BaseException as exception:
            yield TaskFailed.of(exception)
            self.is_finished = True
        self._inherited_task = None


def _save(path: str, state: WorkerState) -> "TaskDone | TaskFailed":
    try:
        if state.save is None:
            raise RuntimeError("no stage of a Trainer has run here")
        state.save(path)
        return TaskDone(RngState.now())
    except Exception as exception:
        return TaskFailed.of(exception)


def _run(
    order: RunTask, message: ReceivedMessage, inherited_task: WorkerTask | None, state: WorkerState
) -> Iterator[Any]:
    order.settings.apply()
    state.is_continuation = order.is_continuation
    state.is_joining = order.is_joining
    state.is_running = True
    try:
        task: WorkerTask | None = inherited_task if order.is_inherited else _opened(message)
        assert task is not None
        return task.run(state, message)
    finally:
        message.received_objects = {}  # it would keep the job's objects
        state.is_running = False
        state.on_interrupt = None


def _opened(message: ReceivedMessage) -> Any:
    try:
        return message.open()
    except (MemoryError, OSError):
        raise
    except Exception as error:
        raise unreadable.explain_unreadable(message.pickled, error) from error


def _prepare(start: WorkerSetup) -> None:
    global _is_importing_main
    if start.preparation is None:
        # Forked from a process whose OpenMP threads, if it had any, are not here: one would wait for them for ever.
        torch.set_num_threads(1)
        return
    if not imports_main(start.preparation):
        use_remote_main()
    _is_importing_main = True
    try:
        # Imports the user's script as `__mp_main__`, where its classes are looked up. `spawn.prepare` is what
        # multiprocessing calls in its own children (Python 3.10 to 3.14).
        multiprocessing.spawn.prepare(start.preparation)
    finally:
        _is_importing_main = False


def imports_main(preparation: Mapping[str, Any]) -> bool:
    """Whether a worker imports the user's script; it cannot where there is none, as in a notebook or for ``python -c``.

    Args:
        preparation: See :class:`.WorkerSetup`.
    """
    return MAIN_NAME in preparation or MAIN_PATH in preparation


def _interrupted(state: WorkerState) -> None:
    if not state.is_running:
        return
    if state.on_interrupt is None:
        raise KeyboardInterrupt
    state.on_interrupt()


def exit_with_parent(pid: int) -> None:
    """Kills this process soon after process ``pid`` is gone, whatever it is doing then.

    The workers of its dataloaders notice within five seconds, and clean up behind them.
    """
    started = start_time(pid)

    def watch() -> None:
        while is_running(pid, started):
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lightning-strategies-ext parent watch").start()


def command(connected: socket.socket, main_pid: int) -> list[str]:
    """Returns the command that starts a worker in an interpreter of its own, with the options of this one."""
    # Collecting garbage while modules are imported takes a sixth of the time and finds none.
    program = "import gc, socket; gc.disable(); from lightning_strategies_ext.launch.processes import worker_main"
    program += f"; worker_main.serve(socket.socket(fileno={connected.fileno()}), {main_pid})"
    return python(program, options=current_options())

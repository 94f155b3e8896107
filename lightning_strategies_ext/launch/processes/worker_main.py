"""Main loop of a worker process: waits for tasks of the main process, runs them, and returns their results.

A worker serves one pool. It exits when the pool shuts it down, when a task fails, and when the main process has exited
for any reason.
"""

import atexit
import gc
import multiprocessing.spawn
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch

from lightning_strategies_ext._system.interpreters import current_options, python
from lightning_strategies_ext._system.peers import is_running, start_time
from lightning_strategies_ext.launch.processes.process_settings import RngState, is_interactive
from lightning_strategies_ext.launch.protocol import (
    EndOfResults,
    JoinPending,
    Ping,
    Pong,
    PullResult,
    RunTask,
    SaveState,
    Shutdown,
    StateSaved,
    TaskDone,
    TaskFailed,
    WorkerSetup,
)
from lightning_strategies_ext.launch.transport.channel import Channel, ReceivedMessage, TaskChannel
from lightning_strategies_ext.launch.transport.pickling import Pickled, use_remote_main

#: Seconds between two checks whether the main process runs.
PARENT_POLL_S = 0.5
#: Keys of preparation data. ``multiprocessing.spawn`` imports the named module or script as the user's ``__main__``.
_MAIN_NAME, _MAIN_PATH = "init_main_from_name", "init_main_from_path"

_is_importing_main = False


class WorkerTask(Protocol):
    """A task for workers. The main process pickles it."""

    def run(self, session: "WorkerSession", message: ReceivedMessage) -> Iterator[Any]:
        """Runs the task that arrived in ``message``; returns the results that the main process may pull, in order.

        Raises:
            TaskFailedError: If the task fails.
        """


class TaskFailedError(Exception):
    """A task failed; ``__cause__`` is the exception.

    Args:
        clean_up: Function to call after the failure is reported, because it may take long.
        results: Results that the main process may pull nevertheless, or None.
    """

    def __init__(self, clean_up: Callable[[], None], results: Iterator[Any] | None) -> None:
        super().__init__()
        self.clean_up = clean_up
        self.results = results


class WorkerSession:
    """Identity of a worker, and the state that it keeps between tasks.

    Attributes:
        rank: Index of the worker in its pool.
        rank_info: Rank info of a worker that may run on another host, else None.
        channel: Channel to the main process, for elastic tasks; None if tasks must not use one.
        is_continuation: Whether the task continues where an earlier one of this pool ended.
        is_joining: Whether the other workers are running the task already.
        is_running: Whether a task runs.
        on_interrupt: Function to call on Ctrl-C while a task runs, instead of raising KeyboardInterrupt.
        save: Function that saves the state of the last stage to a file; None after the next task has started.
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
        """Index of the worker on its host."""
        return self.rank if self.rank_info is None else self.rank_info.local_rank

    def handle_interrupt(self, signum: int, frame: object) -> None:
        """Handles Ctrl-C, which has no effect while no task runs.

        Raises:
            KeyboardInterrupt: If the task has set no :attr:`on_interrupt`.
        """
        if not self.is_running:
            return
        if self.on_interrupt is None:
            raise KeyboardInterrupt
        self.on_interrupt()


def is_importing_main() -> bool:
    """Whether this process is a worker that is importing the user's script."""
    return _is_importing_main


def serve(connected: socket.socket, main_pid: int, inherited_task: WorkerTask | None = None) -> None:
    """Runs a worker until the main process shuts it down. The worker process calls this once.

    Args:
        connected: The worker's end of its channel.
        main_pid: Process ID of the main process.
        inherited_task: Task that the worker has inherited in a fork.
    """
    _exit_with_parent(main_pid)
    with suppress(EOFError, OSError):  # the main process has closed its end
        _serve(Channel(connected), inherited_task)
    gc.collect()  # shuts down DataLoader workers in good order


def serve_in_fork(connected: socket.socket, main_pid: int, inherited_task: WorkerTask | None = None) -> None:
    """Runs a worker like :func:`serve` in a forked process, with its own ``atexit`` handlers, and none of its parent.

    Otherwise a forked process exits without its handlers, unless multiprocessing (Python 3.13 or later) has started it.
    """
    atexit._clear()
    try:
        serve(connected, main_pid, inherited_task)
    finally:
        atexit._run_exitfuncs()


def _exit_with_parent(pid: int) -> None:
    """Kills this process soon after process ``pid`` has exited, whatever this process is doing.

    Its DataLoader workers detect that within five seconds, and clean up.
    """
    started = start_time(pid)

    def monitor() -> None:
        while is_running(pid, started):
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=monitor, daemon=True, name="lightning-strategies-ext parent monitor").start()


def _serve(channel: Channel, inherited_task: WorkerTask | None) -> None:
    start: WorkerSetup = channel.receive()
    service = WorkerService(WorkerSession(start, channel), inherited_task)
    failure = service.set_up(start)
    if failure is not None:
        channel.send(failure)
        return
    while not service.is_finished and not isinstance(message := channel.receive(), Shutdown):
        for reply in service.handle(message, partial(channel.receive_message, private=True)):
            try:
                channel.send(reply)
            except Exception as exception:  # a result of the user's task cannot be pickled
                channel.send(service.fail_unsent_result(exception))


class WorkerService:
    """Handles the messages of the main process, over any transport.

    Args:
        session: Session of this worker.
        inherited_task: Task that the worker has inherited in a fork.

    Attributes:
        is_finished: Whether the worker can handle no more messages.
    """

    def __init__(self, session: WorkerSession, inherited_task: WorkerTask | None = None) -> None:
        self.is_finished = False
        self._session = session
        self._inherited_task = inherited_task
        self._task_message = ReceivedMessage(Pickled(b""))
        self._results: Iterator[Any] = iter(())

    def set_up(self, start: WorkerSetup) -> TaskFailed | None:
        """Prepares this process for tasks; returns the failure, or None."""
        signal.signal(signal.SIGINT, self._session.handle_interrupt)
        try:
            _prepare(start)
        except BaseException as exception:
            return TaskFailed.from_exception(exception)
        # The objects up to here stay, so that collections between tasks can skip them. A collection before the freeze
        # would write to all pages that a forked worker shares with its parent.
        gc.freeze()
        gc.enable()
        return None

    def handle(self, message: Any, receive_task: Callable[[], ReceivedMessage]) -> Iterator[Any]:
        """Yields the replies to a message. The caller exhausts the iterator, because work may follow a reply.

        Args:
            message: Any message except :class:`.Shutdown`.
            receive_task: Callable that waits for the task that follows a :class:`.RunTask`.
        """
        if isinstance(message, Ping):
            yield Pong()
        elif isinstance(message, JoinPending):
            pass  # it arrived after the task
        elif isinstance(message, SaveState):
            yield self._save_state(message.path)
        elif isinstance(message, PullResult):
            yield self._next_result()
        else:
            yield from self._run(message, receive_task)
            gc.collect()  # frees the Trainer of the task, with its memory and its DataLoader workers

    def fail_unsent_result(self, exception: Exception) -> TaskFailed:
        """Returns the reply in place of a result that could not be sent, and drops the remaining results."""
        self._results = iter(())
        gc.collect()
        return TaskFailed.from_exception(exception)

    def _next_result(self) -> Any:
        try:
            result = next(self._results, EndOfResults())
        except Exception as exception:
            return self.fail_unsent_result(exception)
        if isinstance(result, EndOfResults):
            self._results = iter(())
            gc.collect()
        return result

    def _save_state(self, path: str) -> StateSaved | TaskFailed:
        try:
            if self._session.save is None:
                raise RuntimeError(
                    "this worker has no state to save, because its last task was not a stage of a Trainer"
                )
            self._session.save(path)
            return StateSaved()
        except Exception as exception:
            return TaskFailed.from_exception(exception)

    def _run(self, order: RunTask, receive_task: Callable[[], ReceivedMessage]) -> Iterator[Any]:
        self._session.save = None
        self._results = iter(())
        self._task_message.close()
        self._task_message = ReceivedMessage(Pickled(b"")) if order.is_inherited else receive_task()
        try:
            self._results = self._start_task(order)
            yield TaskDone(RngState.now())
        except TaskFailedError as failed:
            yield TaskFailed.from_exception(failed.__cause__ or failed, has_results=failed.results is not None)
            failed.clean_up()
            if failed.results is None:
                self.is_finished = True
                return
            self._results = failed.results
        except BaseException as exception:
            yield TaskFailed.from_exception(exception)
            self.is_finished = True
        self._inherited_task = None

    def _start_task(self, order: RunTask) -> Iterator[Any]:
        """Runs a task; returns its results, which are produced later."""
        order.settings.apply()
        session, message = self._session, self._task_message
        session.is_continuation = order.is_continuation
        session.is_joining = order.is_joining
        session.is_running = True
        try:
            task: WorkerTask | None = self._inherited_task if order.is_inherited else message.open()
            assert task is not None
            return task.run(session, message)
        finally:
            message.received_objects = {}  # otherwise it would keep the task's objects alive
            session.is_running = False
            session.on_interrupt = None


def _prepare(start: WorkerSetup) -> None:
    global _is_importing_main
    if start.preparation is None:
        # A fork has none of the OpenMP threads that its parent may have: it would wait for them indefinitely.
        torch.set_num_threads(1)
        return
    if not imports_main(start.preparation):
        use_remote_main()
    _is_importing_main = True
    try:
        # Imports the user's script as `__mp_main__`, where its classes are looked up. multiprocessing calls
        # `spawn.prepare` in its own children (Python 3.10 to 3.14).
        multiprocessing.spawn.prepare(start.preparation)
    finally:
        _is_importing_main = False


def preparation_data() -> dict[str, Any]:
    """Returns the data with which a worker imports the user's script, see :attr:`.WorkerSetup.preparation`."""
    data = multiprocessing.spawn.get_preparation_data("lightning-strategies-ext worker")
    data["authkey"] = bytes(data["authkey"])
    # After `python -i`, more is defined in `__main__` than by the script. A script that was piped in has no file.
    if is_interactive() or not os.path.exists(data.get(_MAIN_PATH, "/")):
        data.pop(_MAIN_NAME, None)
        data.pop(_MAIN_PATH, None)
    return data


def imports_main(preparation: Mapping[str, Any]) -> bool:
    """Whether a worker with this preparation data imports the user's script; a notebook and ``python -c`` have none."""
    return _MAIN_NAME in preparation or _MAIN_PATH in preparation


def command(connected: socket.socket, main_pid: int) -> list[str]:
    """Returns the command that starts a worker in a new interpreter, with the options of this one."""
    # Garbage collections take a sixth of the time of the imports, and find nothing.
    program = "import gc, socket; gc.disable(); from lightning_strategies_ext.launch.processes import worker_main"
    program += f"; worker_main.serve(socket.socket(fileno={connected.fileno()}), {main_pid})"
    return python(program, options=current_options())

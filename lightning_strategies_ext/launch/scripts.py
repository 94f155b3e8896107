"""The processes that run the user's script once more, for each further device of this host.

Until the ranks have met, only this process can notice that one of them ends, at an error in the script, say: it would
wait for it until the timeout. From then on each rank's watch does (:mod:`lightning_strategies_ext.failure.watch`).
Lightning has an observer for the same, which kills all ranks at once, whatever they still have to save or to say.
"""

import atexit
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_strategies_ext import _lightning
from lightning_strategies_ext.failure.detection import how_it_ended
from lightning_strategies_ext.failure.ending import end_process, fail_at_exit
from lightning_strategies_ext.failure.report import say

#: How often a process is asked whether it has ended, in seconds.
_POLL_S = 0.1
#: How long a process may take to end that has done nothing yet, in seconds.
_END_S = 3.0

_started: list["subprocess.Popen[Any]"] = []


@contextmanager
def started(launcher: Any, have_met: Callable[[], bool]) -> Generator[None, None, None]:
    """Starts the processes of a launcher of Lightning's, unless they are there already.

    They end with what is done in it, if that fails before the ranks have met.

    Args:
        launcher: The launcher.
        have_met: Whether this process has met the others, so that it need not look after them.
    """
    environment = launcher.cluster_environment
    environment.validate_settings(num_devices=launcher.num_processes, num_nodes=launcher.num_nodes)
    try:
        if not environment.creates_processes_externally:
            _lightning.call_children_scripts(launcher)
            atexit.unregister(_fail_if_one_has)
            atexit.register(_fail_if_one_has)
            _started.extend(launcher.procs)
            arguments = (list(launcher.procs), have_met)
            threading.Thread(target=_wait_until_they_have_met, args=arguments, daemon=True, name="script watch").start()
        _lightning.set_num_threads_if_needed(num_processes=launcher.num_processes)
        yield
    except BaseException:
        if not have_met():
            _end(launcher.procs)
        raise


def _end(processes: "Sequence[subprocess.Popen[Any]]") -> None:
    """Ends processes that wait for this one to meet them, and would for long; nobody need look after them any more."""
    _started[:] = [process for process in _started if process not in processes]
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def exit_code_of(pid: int) -> int | None:
    """The exit code of one of the processes, negative for a signal; None if it runs, or is none of them."""
    for process in _started:
        if process.pid == pid:
            return process.poll()
    return None


def _fail_if_one_has() -> None:
    """At the end of this process, which is the one that the user has started: says which others have failed."""
    for rank, process in enumerate(_started, 1):
        if process.poll():
            say(
                f"rank {rank} (pid {process.pid}) has ended with exit code {process.returncode}; that of this one is 1."
            )
            fail_at_exit()


def _wait_until_they_have_met(processes: "list[subprocess.Popen[Any]]", have_met: Callable[[], bool]) -> None:
    while not have_met() and all(process in _started for process in processes):
        for rank, process in enumerate(processes, 1):
            exit_code = process.poll()
            if exit_code is not None and not have_met() and process in _started:
                say(f"rank {rank} (pid {process.pid}) {how_it_ended(exit_code)}, before the ranks had met; all end.")
                _end(processes)
                end_process(1)
        time.sleep(_POLL_S)

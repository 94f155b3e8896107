"""Ranks that are started once and run many functions.

    with RankPool(2) as pool:
        outcomes = pool.run(one_rank, 3)  # those of `one_rank(3)` on each rank

The main process sends functions to the processes of a pool in files, and receives results in files. Each call has a
time limit: the main process kills the ranks of a call that exceeds it, and starts new ranks for the next call.
"""

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist

from benchmarks.rank_launcher import free_port
from lightning_strategies_ext.torch_distributed import process_group
from tests.support.ranks import kill_tree, start_rank

#: Seconds that the other ranks may take to exit after one rank has exited.
ENDING_S = 5.0
#: Seconds that the start of the ranks may take.
START_LIMIT_S = 120.0


@dataclass
class Outcome:
    """The outcome of a function on one rank.

    Attributes:
        value: Value that the function returned, or None.
        error: Class and text of the exception that the function raised, or None. The class is "Hang" for a rank that
            exceeded the time limit, and "Ended" for one that exited; the text is then the output of all ranks.
        trace: Traceback of the exception.
    """

    value: Any = None
    error: tuple[str, str] | None = None
    trace: str = ""


class Process(Protocol):
    """A process, as ``subprocess.Popen``."""

    pid: int

    def poll(self) -> int | None: ...


class RankPool:
    """Processes that run functions, each of which is one rank.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Process] = []
        self._directory = Path()
        self._number = 0

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float) -> list[Outcome]:
        """Returns the outcome of ``function(*args)`` on each rank."""
        if not self._processes:
            self._temporary = tempfile.TemporaryDirectory()
            self._directory = Path(self._temporary.name)
            self._number = 0
            self._processes = self.start(self._directory)
        self._number += 1
        name = f"{self._number}"
        temporary = self._directory / "task.part"
        temporary.write_bytes(pickle.dumps((function, args, free_port())))
        temporary.rename(self._directory / f"task-{name}")
        limit_s += START_LIMIT_S if self._number == 1 else 0.0
        paths = [self._directory / f"outcome-{name}.{rank}" for rank in range(self.world_size)]
        ending = self._wait_for(paths, time.monotonic() + limit_s)
        outcomes = [
            pickle.loads(path.read_bytes()) if path.exists() else Outcome(error=(ending, self._output()))
            for path in paths
        ]
        if ending or (self.world_size > 1 and any(outcome.error is not None for outcome in outcomes)):
            self.close()  # a failed rank may leave connections and threads
        return outcomes

    def _wait_for(self, paths: list[Path], deadline: float) -> str:
        """Waits until all files exist, a process has exited, or the deadline has passed; returns "Ended" or "Hang"."""
        ending = "Hang"
        while not all(path.exists() for path in paths):
            exited = [process.poll() is not None for process in self._processes]
            if any(exited) and ending == "Hang":  # the other ranks detect the exit, and write their outcomes
                ending, deadline = "Ended", time.monotonic() + ENDING_S
            if all(exited) or time.monotonic() > deadline:
                return ending
            time.sleep(0.005)
        return ""

    def _output(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-6000:] for path in self._directory.glob("*.log"))

    def start(self, directory: Path) -> list[Process]:
        """Starts processes that call :func:`serve`. Their output goes to files ``*.log`` in the directory."""
        return [
            _Forked(start_rank(serve, (directory, os.getpid()), directory / f"rank{rank}", variables))
            for rank, variables in enumerate(map(self.variables_of, range(self.world_size)))
        ]

    def variables_of(self, rank: int) -> dict[str, str]:
        """Returns the environment variables of a rank; :func:`serve` sets the port."""
        variables = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": self.world_size, "MASTER_ADDR": "127.0.0.1"}
        return {name: str(value) for name, value in variables.items()}

    def close(self) -> None:
        """Stops the processes, and kills those that do not exit."""
        if not self._processes:
            return
        (self._directory / "stop").touch()
        deadline = time.monotonic() + 3
        while running := [process for process in self._processes if process.poll() is None]:
            if time.monotonic() > deadline:
                for process in running:
                    kill_tree(process.pid)
            time.sleep(0.005)
        self._processes.clear()
        self._temporary.cleanup()


class _Forked:
    def __init__(self, process: Any) -> None:
        self.pid, self._process = process.pid, process

    def poll(self) -> int | None:
        exit_code: int | None = self._process.exitcode
        return exit_code


def serve(directory: Path, main_process: int) -> None:
    """Runs functions in a process of a pool, until the main process closes the pool or exits."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("HOROVOD_RANK", os.environ.get("LOCAL_RANK", "0")))
    number = 1
    while psutil.pid_exists(main_process) and not (directory / "stop").exists():
        path = directory / f"task-{number}"
        if not path.exists():
            time.sleep(0.005)
            continue
        function, args, port = pickle.loads(path.read_bytes())
        os.environ["MASTER_PORT"] = str(port)
        print(f"--- {args}", flush=True)
        outcome = Outcome()
        try:
            outcome.value = function(*args)
        except Exception as exception:
            outcome.error = type(exception).__name__, str(exception)
            outcome.trace = "".join(traceback.format_exception(exception))
        temporary = directory / f"part.{rank}"
        temporary.write_bytes(pickle.dumps(outcome))
        if outcome.error is None and dist.is_initialized():
            dist.barrier()
            process_group.stop()
        temporary.rename(directory / f"outcome-{number}.{rank}")
        number += 1

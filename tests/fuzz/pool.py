"""Ranks that are started once and run many cases.

    with Pool("torch", 2) as pool:  # or "horovod", or "single": one process without ranks
        outcomes = pool.run(case, "ext", directory)

The main process sends cases to the processes of a pool in files, and receives results in files. Each case has a time
limit: the main process kills the ranks of a case that exceeds it, and starts new ranks for the next case.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.horovod_commands import BIN, start_of
from benchmarks.rank_launcher import free_port
from tests.fuzz.cases import Case
from tests.fuzz.training import Outcome
from tests.support.ranks import LONG_CYCLE, REPOSITORY, WITHOUT_MPI, clean_environment, kill_tree

#: Time limit of a case in seconds, which only a hang reaches: most cases take a second.
CASE_LIMIT_S = 120.0
#: Seconds that the other ranks may take to exit after one rank has exited.
ENDING_S = 5.0
#: Seconds that the start of the ranks may take.
START_LIMIT_S = 120.0


class Pool:
    """Processes that run cases.

    Args:
        kind: "torch", "horovod", or "single".
        world_size: Number of ranks.
    """

    def __init__(self, kind: str, world_size: int) -> None:
        self.kind, self.world_size = kind, world_size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._directory = Path()
        self._number = 0

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, case: Case, kind: str, directory: Path, limit_s: float = CASE_LIMIT_S) -> list[Outcome]:
        """Returns the outcome of each rank. The error of a rank without a result is "Hang" or "Ended"."""
        if not self._processes:
            self._start()
        self._number += 1
        name = f"{self._number}"
        port = free_port()
        temporary = self._directory / "task.part"
        temporary.write_bytes(pickle.dumps((case, kind, directory, port)))
        temporary.rename(self._directory / f"task-{name}")
        limit_s += START_LIMIT_S if self._number == 1 else 0.0
        paths = [self._directory / f"outcome-{name}.{rank}" for rank in range(self.world_size)]
        ending = self._wait_for(paths, time.monotonic() + limit_s)
        outcomes = [
            pickle.loads(path.read_bytes()) if path.exists() else Outcome(error=(ending, self._output()))
            for path in paths
        ]
        if ending or (self.kind != "single" and any(outcome.error is not None for outcome in outcomes)):
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
        return "\n".join(path.read_text(errors="replace")[-6000:] for path in self._directory.glob("output-*"))

    def _start(self) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        self._directory = Path(self._temporary.name)
        self._number = 0
        environment = {**clean_environment(), **WITHOUT_MPI, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", "tests.fuzz.pool", str(self._directory), str(os.getpid())]
        if self.kind == "horovod":
            environment |= LONG_CYCLE | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
            self._start_one([*start_of("horovodrun", self.world_size), *command], environment, "all")
            return
        for rank in range(self.world_size):
            variables = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": self.world_size, "MASTER_ADDR": "127.0.0.1"}
            variables = {} if self.kind == "single" else variables
            own = {name: str(value) for name, value in variables.items()}
            self._start_one(command, environment | own, str(rank))

    def _start_one(self, command: list[str], environment: dict[str, str], name: str) -> None:
        with (self._directory / f"output-{name}").open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=output, stderr=output, cwd=REPOSITORY, start_new_session=True
                )
            )

    def close(self) -> None:
        """Kills the processes."""
        if not self._processes:
            return
        (self._directory / "stop").touch()
        for process in self._processes:
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                kill_tree(process.pid)
                process.wait()
        self._processes.clear()
        self._temporary.cleanup()


def main() -> None:
    """Runs in each process of a pool."""
    from tests.fuzz.training import run

    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    rank = int(os.environ.get("HOROVOD_RANK", os.environ.get("LOCAL_RANK", "0")))
    main_process, number = int(sys.argv[2]), 1
    while psutil.pid_exists(main_process) and not (directory / "stop").exists():
        path = directory / f"task-{number}"
        if not path.exists():
            time.sleep(0.005)
            continue
        case, kind, files, port = pickle.loads(path.read_bytes())
        os.environ["MASTER_PORT"] = str(port)
        print(f"--- {case} {kind}", flush=True)
        outcome: Any = run(case, kind, files)
        temporary = directory / f"part.{rank}"
        temporary.write_bytes(pickle.dumps(outcome))
        if outcome.error is None:
            _leave_process_group()
        temporary.rename(directory / f"outcome-{number}.{rank}")
        number += 1


def _leave_process_group() -> None:
    from lightning_strategies_ext.torch_distributed import process_group

    if dist.is_initialized():
        dist.barrier()
        process_group.stop()


if __name__ == "__main__":
    main()

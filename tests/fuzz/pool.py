"""Processes that are started once and run many cases.

with Pool("torch", 2) as pool:  # or "horovod", or "single": one process without ranks
    outcomes = pool.run(run, case, "ext", directory, limit_s=CASE_LIMIT_S)
"""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.horovod_commands import BIN, start_of
from tests.support.rank_pool import RankPool, serve
from tests.support.ranks import LONG_CYCLE, REPOSITORY, WITHOUT_MPI, clean_environment

#: Time limit of a case in seconds, which only a hang reaches: most cases take a second.
CASE_LIMIT_S = 120.0


class Pool(RankPool):
    """Processes that run cases as programs of a user do: they are not forked from another process.

    Args:
        kind: "torch", "horovod", or "single".
        world_size: Number of ranks.
    """

    def __init__(self, kind: str, world_size: int) -> None:
        super().__init__(world_size)
        self.kind = kind

    def start(self, directory: Path) -> list["subprocess.Popen[bytes]"]:
        environment = {**clean_environment(), **WITHOUT_MPI, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", "tests.fuzz.pool", str(directory), str(os.getpid())]
        if self.kind == "horovod":
            environment |= LONG_CYCLE | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
            return [
                _start_one([*start_of("horovodrun", self.world_size), *command], environment, directory / "all.log")
            ]
        return [
            _start_one(
                command,
                environment | ({} if self.kind == "single" else self.variables_of(rank)),
                directory / f"rank{rank}.log",
            )
            for rank in range(self.world_size)
        ]


def _start_one(command: list[str], environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, cwd=REPOSITORY, start_new_session=True
        )


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))

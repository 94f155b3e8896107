"""All that may go wrong: kinds of faults at moments of a run, on ranks of strategies; and how one case is tried."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch

from tests.faults.program import PATIENCE_S
from tests.support.ranks import REPOSITORY, clean_environment

#: Kinds of faults, by what the user should read of them as the first cause; None where nothing failed.
KINDS = {
    "exception": "ValueError: the first cause",
    "base_exception": "OwnBaseException: the first cause",
    "sigterm": None,
    "sigint": None,
    "sigkill": r"process \(pid \d+\) (was killed by SIGKILL|is gone)|SIGKILL",
    "sigsegv": r"process \(pid \d+\) (was killed by SIGSEGV|is gone)|SIGSEGV",
    "sigstop": "is stopped",
    "os_exit": r"process \(pid \d+\) (ended|is gone)|exit code 0",
    "sleep": "(has|have) waited",
    "hold_gil": "does not answer",
    "collective": "collective",
}
#: After these, the others have to wait for a while before they know.
STUCK = ("sigstop", "sleep", "hold_gil")
MOMENTS = (
    "before the group",
    "setup",
    "sanity check",
    "forward",
    "backward",
    "optimizer step",
    "validation",
    "end of epoch",
    "checkpoint",
    "data-loader worker",
    "between two stages",
    "predict",
    "teardown",
)
FABRIC_MOMENTS = (
    "before the group",
    "setup",
    "forward",
    "backward",
    "optimizer step",
    "checkpoint",
    "data-loader worker",
)
OURS = ("ddp_ext", "ddp_spawn_ext", "horovod_ext", "fabric")
#: What a process may take to end after a fault, in seconds.
LIMIT_S = 10.0
#: How long the script may take until the fault happens, in seconds.
START_S = 120.0
_NAME = "LIGHTNING_STRATEGIES_EXT_FAULT"


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        kind: One of :data:`KINDS`.
        moment: One of :data:`MOMENTS`.
        rank: On which it happens.
        strategy: Name of the strategy, or "fabric" for ours under Fabric.
        world_size: Number of ranks.
    """

    kind: str
    moment: str
    rank: int
    strategy: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.strategy}-{self.world_size}-{self.kind}-{self.moment.replace(' ', '_')}-rank{self.rank}"

    @property
    def limit_s(self) -> float:
        """What processes may take to end, in seconds."""
        return LIMIT_S + (PATIENCE_S if self.kind in STUCK else 0)


@dataclass
class Result:
    """What came of a case.

    Attributes:
        case: The case.
        seconds: From the fault to the end of the last process; None if some had to be killed.
        exit_code: Of the process that the user started.
        output: What it wrote.
        left: What is left behind, or does not load.
        limit_s: What processes were allowed to take to end, in seconds; that of the case if None.
    """

    case: Case
    seconds: float | None
    exit_code: int | None
    output: str
    left: list[str] = field(default_factory=list)
    limit_s: float | None = None

    @property
    def problems(self) -> list[str]:
        """What is not as it should be."""
        problems = list(self.left)
        limit_s = self.limit_s or self.case.limit_s
        if self.seconds is None or self.seconds > limit_s:
            took = (
                "some processes did not end" if self.seconds is None else f"the last process took {self.seconds:.1f} s"
            )
            problems.append(f"{took}, and {limit_s:g} s were allowed")
        expected = KINDS[self.case.kind]
        if expected is None:
            return problems
        is_main = self.case.rank == 0 and (
            self.case.strategy != "ddp_spawn_ext" or self.case.moment in ("before the group", "between two stages")
        )
        if self.exit_code == 0 and not (is_main and self.case.kind == "os_exit"):
            problems.append("the exit code is 0")
        is_mute = is_main and self.case.kind in ("sigkill", "sigsegv", "sigstop", "os_exit", "sleep", "hold_gil")
        if not is_mute and not re.search(expected, self.output):
            problems.append(f"nothing is said of {expected!r}")
        return problems


def all_cases(strategies: tuple[str, ...] = OURS, world_sizes: tuple[int, ...] = (2, 3)) -> Iterator[Case]:
    """Every case of some strategies."""
    for strategy in strategies:
        for world_size in world_sizes:
            for moment in FABRIC_MOMENTS if strategy == "fabric" else MOMENTS:
                for kind in KINDS:
                    for rank in (0, world_size - 1):
                        if is_possible(kind, moment, rank, strategy):
                            yield Case(kind, moment, rank, strategy, world_size)


def is_possible(kind: str, moment: str, rank: int, strategy: str) -> bool:
    """Whether there is such a case.

    There is no collective before the ranks have met, nor in a worker of a loader, and over Horovod none of
    torch.distributed. Before they have met, and where only the main process is, nobody waits for it to move. A worker
    of a loader has its own ways with the signals that ask it to end, and a loader waits for one that is stuck as for a
    slow disk.
    """
    if kind == "collective":
        return moment not in ("before the group", "data-loader worker") and strategy != "horovod_ext"
    if moment == "before the group" or (moment == "between two stages" and strategy == "ddp_spawn_ext"):
        return kind not in STUCK and (rank == 0 or strategy != "ddp_spawn_ext")
    if moment == "data-loader worker":
        return kind in ("exception", "sigkill", "sigsegv", "os_exit")
    return True


def try_case(case: Case, directory: Path, limit_s: float | None = None) -> Result:
    """Runs the script of a case, and waits until all its processes have ended.

    Args:
        case: The case.
        directory: An empty one.
        limit_s: What processes are allowed to take to end, in seconds; that of the case if None.
    """
    before = _shared_memory()
    script = Path(__file__).parent / "program.py"
    process = subprocess.Popen(
        [sys.executable, script, json.dumps(asdict(case)), directory],
        env={**clean_environment(), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", _NAME: str(directory)},
        stdout=(directory / "output").open("w"),
        stderr=subprocess.STDOUT,
        cwd=directory,
    )
    happened = directory / "happened"
    deadline = time.monotonic() + START_S
    while not happened.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    seconds = None
    begin = time.monotonic()
    while time.monotonic() < begin + (limit_s or case.limit_s) + 10:
        process.poll()
        if process.returncode is not None and not _processes_of(directory):
            seconds = max(0.0, time.time() - json.loads(happened.read_text())[0]) if happened.exists() else None
            break
        time.sleep(0.1)
    left = [] if happened.exists() else ["the fault did not happen"]
    for other in _processes_of(directory):
        with suppress(psutil.Error):
            left.append(f"process {other.pid} ({other.status()}) is left: {' '.join(other.cmdline())[:80]}")
            other.kill()
    process.kill()
    process.wait()
    left += [f"{name} is left" for name in _shared_memory() - before]
    for checkpoint in directory.glob("*.ckpt"):
        try:
            torch.load(checkpoint, weights_only=False)
        except Exception as error:
            left.append(f"{checkpoint.name} does not load: {error}")
    return Result(case, seconds, process.returncode, (directory / "output").read_text(), left, limit_s)


def _processes_of(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_ours = process.uids().real == os.getuid() and process.environ().get(_NAME) == str(directory)
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _shared_memory() -> set[str]:
    """The files of this package's that are in shared memory: others use it, too."""
    return {path.name for path in Path("/dev/shm").glob("*lightning_strategies_ext*")}

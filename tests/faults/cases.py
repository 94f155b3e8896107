"""Cases of fault injection: kinds of faults, moments of a run, ranks, and strategies; and the execution of a case."""

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

from benchmarks.horovod_commands import BIN
from benchmarks.rank_launcher import free_port
from tests.faults.program import HANG_TIMEOUT_S
from tests.support.namespace_hosts import ADDRESSES, put_ssh, two_hosts
from tests.support.ranks import REPOSITORY, clean_environment

#: Kinds of faults, with a pattern of the first failure in the output; None if the run must not report a failure.
KINDS = {
    "exception": "ValueError: the first cause",
    "base_exception": "OwnBaseException: the first cause",
    "sigterm": None,
    "sigint": None,
    "sigkill": r"process \(pid \d+\) (was killed by SIGKILL|exited for an unknown)|SIGKILL",
    "sigsegv": r"process \(pid \d+\) (was killed by SIGSEGV|exited for an unknown)|SIGSEGV",
    "sigstop": "is stopped",
    "os_exit": r"process \(pid \d+\) exited|exit code 0",
    "sleep": " waited ",
    "hold_gil": "sends no heartbeats",
    "collective": "collective",
    "cable": r"(is|are) lost",
}
#: Message of torch about a DataLoader worker that has exited, for any reason.
OF_LOADER = r"DataLoader worker \(pid\S* \d+\) (is killed by signal|exited unexpectedly)"
#: Message of ``horovodrun`` about the exit code of a rank, if no other rank of the host reports the failure.
OF_LAUNCHER = {"sigkill": "exit with status code 137", "sigsegv": "exit with status code 139"}
#: Faults that other ranks detect only after a timeout.
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
EXT = ("ddp_ext", "ddp_spawn_ext", "horovod_ext", "fabric")
#: Strategies that can have ranks on two hosts in these tests.
ON_HOSTS = ("ddp_ext", "horovod_ext", "fabric", "ddp")
#: Seconds that a process may take to exit after a fault.
LIMIT_S = 10.0
#: Additional seconds for the detection of a host loss.
LOST_S = 10.0
#: Seconds that the script may take until the fault happens.
START_S = 300.0
_NAME = "LIGHTNING_STRATEGIES_EXT_FAULT"


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        kind: One of :data:`KINDS`.
        moment: One of :data:`MOMENTS`.
        rank: Rank on which the fault happens.
        strategy: Name of the strategy, or "fabric" for this package's ``DDPStrategy`` of Fabric.
        world_size: Number of ranks.
        hosts: Number of hosts, see :mod:`tests.support.namespace_hosts`.
        accelerator: Argument of the Trainer or Fabric. With "gpu", all ranks share the first GPU, each as a host.
    """

    kind: str
    moment: str
    rank: int
    strategy: str
    world_size: int
    hosts: int = 1
    accelerator: str = "cpu"

    def __str__(self) -> str:
        size = str(self.world_size) if self.hosts == 1 else f"{self.hosts}x{self.world_size // self.hosts}"
        size += "" if self.accelerator == "cpu" else f"-{self.accelerator}"
        return f"{self.strategy}-{size}-{self.kind}-{self.moment.replace(' ', '_')}-rank{self.rank}"

    @property
    def limit_s(self) -> float:
        """Seconds that the processes may take to exit."""
        return LIMIT_S + (HANG_TIMEOUT_S if self.kind in STUCK else LOST_S if self.kind == "cable" else 0)


@dataclass
class Result:
    """The result of a case.

    Attributes:
        case: The case.
        seconds: Seconds from the fault to the exit of the last process; None if some processes had to be killed.
        exit_codes: Exit code of the process that the user started on each host; over Horovod, that of ``horovodrun``.
        output: Output of the processes.
        left: Remaining processes and files, and checkpoints that cannot be loaded.
        limit_s: Seconds that the processes may take to exit; None means the limit of the case.
    """

    case: Case
    seconds: float | None
    exit_codes: list[int | None]
    output: str
    left: list[str] = field(default_factory=list)
    limit_s: float | None = None

    @property
    def is_late_only(self) -> bool:
        """Whether the time limit was exceeded, and no other problem was found."""
        return self.seconds is not None and len(self.problems) == 1 and "were allowed" in self.problems[0]

    @property
    def problems(self) -> list[str]:
        """Descriptions of all problems."""
        problems = list(self.left)
        limit_s = self.limit_s or self.case.limit_s
        if self.seconds is None or self.seconds > limit_s:
            took = (
                "some processes did not exit"
                if self.seconds is None
                else f"the last process exited after {self.seconds:.1f} s"
            )
            problems.append(f"{took}; {limit_s:g} s were allowed")
        expected = KINDS[self.case.kind]
        if expected is None:
            return problems
        is_main = self.case.rank == 0 and (
            self.case.strategy != "ddp_spawn_ext" or self.case.moment in ("before the group", "between two stages")
        )
        is_main &= self.case.strategy != "horovod_ext" or self.case.hosts == 1
        own = self.case.rank * self.case.hosts // self.case.world_size
        is_first = self.case.rank * self.case.hosts % self.case.world_size == 0
        for host, code in enumerate(self.exit_codes):
            if self.case.moment == "predict" and host not in (0, own):
                continue  # the ranks of this host may have exited before
            is_own = self.case.kind == "os_exit" and host == own and is_first and (is_main or host > 0)
            if code == 0 and not is_own:
                problems.append("an exit code is 0")
        reports_nothing = is_main and self.case.kind in (
            "sigkill",
            "sigsegv",
            "sigstop",
            "os_exit",
            "sleep",
            "hold_gil",
        )
        if self.case.moment == "data-loader worker":
            expected = f"{expected}|{OF_LOADER}"
        if self.case.strategy == "horovod_ext" and self.case.kind in OF_LAUNCHER:
            expected = f"{expected}|{OF_LAUNCHER[self.case.kind]}"
        if not reports_nothing and not re.search(expected, self.output):
            problems.append(f"the output does not contain {expected!r}")
        return problems


def all_cases(
    strategies: tuple[str, ...] = EXT, worlds: tuple[tuple[int, int], ...] = ((2, 1), (3, 1), (2, 2), (4, 2))
) -> Iterator[Case]:
    """Yields all cases of the strategies; ``worlds`` are pairs of a number of ranks and a number of hosts."""
    for strategy in strategies:
        for world_size, hosts in worlds:
            for moment in FABRIC_MOMENTS if strategy == "fabric" else MOMENTS:
                for kind in KINDS:
                    for rank in (0, world_size - 1):
                        case = Case(kind, moment, rank, strategy, world_size, hosts)
                        if is_possible(kind, moment, rank, strategy) and is_possible_on_hosts(case):
                            yield case


def is_possible_on_hosts(case: Case) -> bool:
    """Returns whether a case is possible on its number of hosts.

    Before the rendezvous, only its timeout detects the loss of a host. A rank that is stopped, or holds the GIL, is
    killed by another rank of its host. If it is alone there, its launcher must terminate it. While ranks predict, they
    need not detect a disconnected network.
    """
    if case.hosts == 1:
        return case.kind != "cable"
    if case.strategy not in ON_HOSTS or case.moment == "before the group":
        return False
    if case.kind in ("sigstop", "hold_gil"):
        return case.hosts < case.world_size
    return case.kind != "cable" or case.moment not in ("data-loader worker", "predict")


def is_possible(kind: str, moment: str, rank: int, strategy: str) -> bool:
    """Returns whether a case is possible.

    There is no collective before the rendezvous, nor in a DataLoader worker, and over Horovod there is no collective of
    torch.distributed. Before the rendezvous, and in stages with the main process only, no rank waits for that process.
    A DataLoader worker has its own signal handlers, and a DataLoader waits for a hung worker as for a slow disk. In
    `predict`, ranks do not wait for each other, and the ranks that rank 0 has started exit before rank 0. If rank 0 is
    stopped then, no rank detects it.
    """
    if moment == "predict" and rank == 0 and kind in ("sigstop", "hold_gil") and strategy != "ddp_spawn_ext":
        return False
    is_main_only = strategy == "ddp_spawn_ext" and moment in ("before the group", "between two stages")
    if is_main_only and rank > 0:
        return False
    if kind == "collective":
        return moment not in ("before the group", "data-loader worker") and strategy != "horovod_ext"
    if is_main_only or moment == "before the group":
        return kind not in STUCK
    if moment == "data-loader worker":
        return kind in ("exception", "sigkill", "sigsegv", "os_exit")
    return True


def try_case(case: Case, directory: Path, limit_s: float | None = None) -> Result:
    """Runs the script of a case, and waits until all its processes have exited.

    Args:
        case: The case.
        directory: An empty directory.
        limit_s: Seconds that the processes may take to exit; None means the limit of the case.

    Raises:
        NoHostsError: If the case has two hosts, and this machine permits no network namespaces.
    """
    program = [sys.executable, str(Path(__file__).parent / "program.py"), json.dumps(asdict(case)), str(directory)]
    env = {**clean_environment(), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", _NAME: str(directory)}
    if case.accelerator != "cpu":
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environments = [env | {"NODE_RANK": str(index)} for index in range(case.hosts)]
        return _try([program] * case.hosts, environments, case, directory, limit_s)
    if case.hosts == 1:
        return _try([program], [env], case, directory, limit_s)
    with two_hosts(directory) as hosts:
        if case.strategy != "horovod_ext":
            env |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
            commands = [[*host.enter(), *program] for host in hosts]
            return _try(commands, [env | {"NODE_RANK": str(index)} for index in range(2)], case, directory, limit_s)
        put_ssh(hosts, directory)
        slots = ",".join(f"{host.name}:{case.world_size // case.hosts}" for host in hosts)
        start = ["horovodrun", "-np", str(case.world_size), "-H", slots, "--gloo", "--network-interfaces", "eth0"]
        env |= {"PATH": f"{directory}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"}
        return _try([[*hosts[0].enter(), *start, *program]], [env], case, directory, limit_s)


def _try(
    commands: list[list[str]], environments: list[dict[str, str]], case: Case, directory: Path, limit_s: float | None
) -> Result:
    before = _shared_memory()
    outputs = [directory / f"output{index}" for index in range(len(commands))]
    processes = [
        subprocess.Popen(command, env=env, stdout=output.open("w"), stderr=subprocess.STDOUT, cwd=directory)
        for command, env, output in zip(commands, environments, outputs, strict=True)
    ]
    happened = directory / "happened"
    deadline = time.monotonic() + START_S
    while not happened.exists() and any(each.poll() is None for each in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    seconds = None
    begin = time.monotonic()
    while time.monotonic() < begin + (limit_s or case.limit_s) + 10:
        if all(each.poll() is not None for each in processes) and not _processes_of(directory):
            seconds = max(0.0, time.time() - json.loads(happened.read_text())[0]) if happened.exists() else None
            break
        time.sleep(0.1)
    left = [] if happened.exists() else ["the fault did not happen"]
    for other in _processes_of(directory):
        with suppress(psutil.Error):
            left.append(f"process {other.pid} ({other.status()}) still runs: {' '.join(other.cmdline())[:80]}")
            other.kill()
    for process in processes:
        process.kill()
        process.wait()
    left += [f"file {name} is left" for name in _shared_memory() - before]
    for checkpoint in directory.glob("*.ckpt"):
        try:
            torch.load(checkpoint, weights_only=False)
        except Exception as error:
            left.append(f"{checkpoint.name} cannot be loaded: {error}")
    output = "".join(path.read_text() for path in outputs)
    return Result(case, seconds, [each.returncode for each in processes], output, left, limit_s)


def _processes_of(directory: Path) -> list[psutil.Process]:
    """Returns the processes of a case, found by their directory or by a variable of their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if Path(process.cwd()) == directory or process.environ().get(_NAME) == str(directory):
                found.append(process)
    return found


def _shared_memory() -> set[str]:
    """Returns the files of this package in shared memory, which other programs use, too."""
    return {path.name for path in Path("/dev/shm").glob("*lightning_strategies_ext*")}

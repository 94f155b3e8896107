"""Starts the ranks of a test, collects the outcome of each, and always cleans up.

    def one_rank(size):                       # what one rank does; runs in a process of its own
        return strategy.reduce(torch.ones(size)).tolist()

    assert run_ranks(one_rank, 3) == [[1.0] * 3] * 2

The functions stand at the top level of a test module, so that ranks can import them. Ranks are forked from a
multiprocessing forkserver that has imported torch and Lightning. :func:`run_script` runs a program as a user would:

    assert run_script("-m", "lightning_strategies_ext").returncode == 0
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from lightning_utilities.core.imports import RequirementCache

from benchmarks.ranks import free_port
from lightning_strategies_ext.torch_distributed import process_group

REPOSITORY = Path(__file__).parents[2]
#: Seconds until ranks and programs are killed. Only a hang reaches this limit: most take a hundredth of it.
LIMIT_S = 300
#: What keeps Lightning's detection of MPI from its costs in each rank.
WITHOUT_MPI = (
    {"MPI4PY_MPIABI": "none"} if RequirementCache("lightning>=2.6") else {"OMPI_MCA_btl": "self", "OMPI_MCA_pml": "ob1"}
)
#: Horovod's ranks over gloo speak to each other once in so many milliseconds, also when they have nothing to say, which
#: with our default of 0.1 takes a third of a core for each of them. More would make those wait that have something.
SELDOM = {"HOROVOD_CYCLE_TIME": "1"}
#: What each rank finds in its environment besides; tests that set something undo it.
rank_environment: dict[str, str] = {}
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["lightning.pytorch", "torchmetrics", "lightning_strategies_ext.pytorch.ddp", "tests.support.models"]
)


@dataclass
class Outcome:
    """How one rank ended.

    Attributes:
        value: What the function returned, if it returned.
        error: The trace of the exception it raised, or None.
        exit_code: As multiprocessing gives it: negative for a signal.
        output: What the rank wrote to standard output and error.
    """

    rank: int
    value: Any
    error: str | None
    exit_code: int | None
    output: str

    def __str__(self) -> str:
        return f"--- rank {self.rank}: exit code {self.exit_code}\n{self.output}\n{self.error or ''}"


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2, timeout_s: float = LIMIT_S) -> list[Any]:
    """Runs ``function(*args)`` in ``world_size`` processes and returns their values in rank order.

    Raises:
        AssertionError: If a rank raised, died or took too long; shows the output of all.
    """
    outcomes = outcomes_of_ranks(function, *args, world_size=world_size, timeout_s=timeout_s)
    if any(outcome.error is not None or outcome.exit_code != 0 for outcome in outcomes):
        raise AssertionError("\n".join(str(outcome) for outcome in outcomes))
    return [outcome.value for outcome in outcomes]


def outcomes_of_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, timeout_s: float = LIMIT_S
) -> list[Outcome]:
    """Like :func:`run_ranks`, for ranks that are expected to fail: returns every rank's outcome."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, f"rank{rank}") for rank in range(world_size)]
        ranks = [
            _context.Process(
                target=_rank_main, args=(function, args, rank, world_size, port, path, dict(rank_environment))
            )
            for rank, path in enumerate(paths)
        ]
        try:
            for process in ranks:
                process.start()
            deadline = time.monotonic() + timeout_s
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in ranks:
                if process.pid is not None and process.is_alive():
                    kill_tree(process.pid)
                    process.join()
        return [_outcome(rank, process.exitcode, paths[rank]) for rank, process in enumerate(ranks)]


def _outcome(rank: int, exit_code: int | None, path: Path) -> Outcome:
    log, result = path.with_suffix(".log"), path.with_suffix(".result")
    value, error = None, "no result: the rank was killed, or was still running at the time limit"
    if result.exists() and result.stat().st_size > 0:
        value, error = torch.load(result, weights_only=False)
    return Outcome(rank, value, error, exit_code, log.read_text() if log.exists() else "")


def leave_process_group() -> None:
    """Lets what a rank does next start a process group of its own; otherwise it would go on with the one that is there.

    The next one is made at another address: the first rank may serve the old one for a while.
    """
    port = [free_port()]
    dist.broadcast_object_list(port)
    process_group.stop()
    os.environ["MASTER_PORT"] = str(port[0])


def run_script(
    *command: str | Path, env: dict[str, str] | None = None, timeout_s: float = LIMIT_S, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program with this interpreter, as a user would. Kills all that it has started if it exceeds the limit."""
    return run_command(sys.executable, *command, env=env, timeout_s=timeout_s, cwd=cwd)


def run_command(
    *command: str | Path, env: dict[str, str] | None = None, timeout_s: float = LIMIT_S, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs any program. Kills all that it has started if it exceeds the limit."""
    process = start_command(*command, env=env, cwd=cwd)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        output, _ = process.communicate()
        raise AssertionError(f"{command} took more than {timeout_s} s:\n{output}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def start_script(
    *command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> "subprocess.Popen[str]":
    """Starts a program like :func:`run_script`; its standard output and standard error are one stream."""
    return start_command(sys.executable, *command, env=env, cwd=cwd)


def start_command(
    *command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> "subprocess.Popen[str]":
    """Starts any program; its standard output and standard error are one stream. It has one thread by default."""
    return subprocess.Popen(
        [*map(str, command)],
        env={"OMP_NUM_THREADS": "1", **clean_environment(), "PYTHONPATH": str(REPOSITORY), **(env or {})},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a signal to the program's process group does not reach pytest
    )


def clean_environment() -> dict[str, str]:
    """This process's environment without what could make a program think that it is a rank already."""
    names = {"LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
    beginnings = ("PL_", "HOROVOD_")
    return {name: value for name, value in os.environ.items() if name not in names and not name.startswith(beginnings)}


def kill_tree(pid: int) -> None:
    """Kills a process and all its descendants."""
    try:
        process = psutil.Process(pid)
        victims = [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return
    for victim in victims:
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def start_server() -> None:
    """Starts the server that ranks are forked from, before a test changes the environment that the server inherits."""
    process = _context.Process(target=int)
    process.start()
    process.join()


def _rank_main(
    function: Callable[..., Any],
    args: Any,
    rank: int,
    world_size: int,
    port: int,
    path: Path,
    environment: dict[str, str],
) -> None:
    """Runs a function in the process of a rank; its output and its result go to files."""
    output = os.open(path.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(
        environment,
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    value, error = None, None
    with path.with_suffix(".result").open("wb") as result:  # before the rank may become another user
        try:
            value = function(*args)
        except BaseException:
            error = traceback.format_exc()
            raise
        finally:
            torch.save((value, error), result)

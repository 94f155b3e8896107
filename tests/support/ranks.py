"""Starts the ranks of a test, collects the outcome of each, and always cleans up.

    def one_rank(size):                       # runs in the process of each rank
        return strategy.reduce(torch.ones(size)).tolist()

    assert run_ranks(one_rank, 3) == [[1.0] * 3] * 2

The functions are at the top level of a test module, so that ranks can import them. Ranks are forked from a
multiprocessing forkserver that has imported torch and Lightning. :func:`run_script` runs a program as a user would:

    assert run_script("-m", "lightning_strategies_ext").returncode == 0
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from lightning_utilities.core.imports import RequirementCache

from benchmarks.rank_launcher import free_port
from lightning_strategies_ext.torch_distributed import process_group

REPOSITORY = Path(__file__).parents[2]
#: Seconds until ranks and programs are killed. Only a hang reaches this limit: most take a hundredth of it.
LIMIT_S = 300
#: Variables with which Lightning's detection of MPI does not slow down each rank.
WITHOUT_MPI = (
    {"MPI4PY_MPIABI": "none"} if RequirementCache("lightning>=2.6") else {"OMPI_MCA_btl": "self", "OMPI_MCA_pml": "ob1"}
)
#: Horovod's ranks over gloo communicate once per cycle of this number of milliseconds, also without a collective. With
#: the package's default of 0.1, this takes a third of a core per rank. A longer cycle would delay collectives.
LONG_CYCLE = {"HOROVOD_CYCLE_TIME": "1"}
#: Further variables in the environment of each rank. A test that sets one restores it.
rank_environment: dict[str, str] = {}
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["lightning.pytorch", "torchmetrics", "lightning_strategies_ext.pytorch.ddp", "tests.support.models"]
)


@dataclass
class Outcome:
    """The outcome of one rank.

    Attributes:
        rank: Global rank.
        value: Value that the function returned, or None.
        error: Traceback of the exception that the function raised, or None.
        exit_code: Exit code; negative for a signal.
        output: Standard output and standard error of the rank.
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
        AssertionError: If a rank raised, died, or reached the time limit. The message has the output of all ranks.
    """
    outcomes = outcomes_of_ranks(function, *args, world_size=world_size, timeout_s=timeout_s)
    if any(outcome.error is not None or outcome.exit_code != 0 for outcome in outcomes):
        raise AssertionError("\n".join(str(outcome) for outcome in outcomes))
    return [outcome.value for outcome in outcomes]


def outcomes_of_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, timeout_s: float = LIMIT_S
) -> list[Outcome]:
    """Returns the outcomes of all ranks, like :func:`run_ranks`, for ranks that are expected to fail."""
    shared = {"NODE_RANK": "0", "WORLD_SIZE": str(world_size)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, f"rank{rank}") for rank in range(world_size)]
        environments = [{**rank_environment, **shared, "LOCAL_RANK": str(rank)} for rank in range(world_size)]
        ranks = [
            _context.Process(target=_rank_main, args=(function, args, path, environment))
            for path, environment in zip(paths, environments, strict=True)
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


def start_rank(function: Callable[..., Any], args: Any, path: Path, environment: dict[str, str]) -> Any:
    """Starts ``function(*args)`` in a process of the fork server. Its output goes to ``path`` plus ".log"."""
    process = _context.Process(target=_rank_main, args=(function, args, path, {**rank_environment, **environment}))
    process.start()
    return process


def leave_process_group() -> None:
    """Destroys the process group, so that the next Trainer of this rank creates a group. Collective: all ranks call it.

    The next process group has a different port, because rank 0 may still serve the store at the old port.
    """
    port = [free_port()]
    dist.broadcast_object_list(port)
    process_group.stop()
    os.environ["MASTER_PORT"] = str(port[0])


def run_script(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program with this interpreter, as a user would; the options are those of :func:`run_command`."""
    return run_command(sys.executable, *command, **options)


def run_command(*command: str | Path, timeout_s: float = LIMIT_S, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program, and kills all its processes at the time limit; options are those of :func:`start_command`."""
    process = start_command(*command, **options)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        output, errors = process.communicate()
        raise AssertionError(f"{command} took more than {timeout_s} s:\n{output}{errors or ''}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors or "")


def start_script(*command: str | Path, **options: Any) -> "subprocess.Popen[str]":
    """Starts a program with this interpreter; the options are those of :func:`start_command`."""
    return start_command(sys.executable, *command, **options)


def start_command(
    *command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None, stderr: int = subprocess.STDOUT
) -> "subprocess.Popen[str]":
    """Starts a program, which has one thread by default. Its standard output is a pipe, with standard error in it."""
    return subprocess.Popen(
        [*map(str, command)],
        env={"OMP_NUM_THREADS": "1", **clean_environment(), "PYTHONPATH": str(REPOSITORY), **(env or {})},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,  # a signal to the program's process group does not reach pytest
    )


def clean_environment() -> dict[str, str]:
    """Returns the environment of this process without the variables of a rank."""
    names = {"LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
    beginnings = ("PL_", "HOROVOD_")
    return {name: value for name, value in os.environ.items() if name not in names and not name.startswith(beginnings)}


def kill_tree(pid: int) -> None:
    """Kills a process and all its descendants."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def start_server() -> None:
    """Starts the fork server of ranks, before a test changes the environment that the server inherits."""
    process = _context.Process(target=int)
    process.start()
    process.join()


def _rank_main(function: Callable[..., Any], args: Any, path: Path, environment: dict[str, str]) -> None:
    """Runs a function in the process of a rank; its output and its result go to files."""
    output = os.open(path.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(environment)
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

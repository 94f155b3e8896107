"""Runs a function on ranks of Horovod, which a launcher starts, and collects what each rank returns or raises.

    outcomes = run_horovod("mpirun", function, *args)

The function is at the top level of a module. It runs in each rank of ``horovodrun`` or ``mpirun``. With "python", it
first runs in one process, and again in the ranks that ``fit`` starts.
"""

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.horovod_commands import BIN, start_of
from lightning_strategies_ext.horovod.launch_info import LaunchInfo
from tests.support.ranks import LIMIT_S, LONG_CYCLE, run_command


def run_horovod(launcher: str, function: Callable[..., Any], *args: Any, num_ranks: int = 2) -> list[Any]:
    """Returns each rank's value.

    Raises:
        AssertionError: If a rank raises or does not end.
    """
    output, outcomes = try_horovod(launcher, function, *args, num_ranks=num_ranks)
    ended = [outcome for _, outcome in sorted(outcomes.items())]
    traces = [outcome.trace for outcome in ended if isinstance(outcome, Failed)]
    if traces or len(ended) < num_ranks:
        raise AssertionError("\n".join([f"ranks {sorted(outcomes)} of {num_ranks} have finished:", *traces, output]))
    return ended


def try_horovod(
    launcher: str, function: Callable[..., Any], *args: Any, num_ranks: int = 2, timeout_s: float = LIMIT_S
) -> tuple[str, dict[int, Any]]:
    """Returns the output, and the value or the :class:`Failed` of each rank that has finished."""
    environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", **(LONG_CYCLE if launcher != "mpirun" else {})}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "task").write_bytes(pickle.dumps((function, args)))
        # Open MPI shares memory through files in this directory, which a killed rank does not remove.
        start = start_of(launcher, num_ranks, name)
        result = run_command(*start, sys.executable, "-m", __name__, name, env=environment, timeout_s=timeout_s)
        paths = [path for path in directory.iterdir() if path.name.isdecimal()]
        return result.stdout, {int(path.name): pickle.loads(path.read_bytes()) for path in paths}


class Failed:
    """An exception that a rank raised."""

    def __init__(self, exception: BaseException) -> None:
        self.name = type(exception).__name__
        self.text = str(exception)
        self.trace = "".join(traceback.format_exception(exception))


def main() -> None:
    """Runs the function in each rank."""
    from tests.support.horovod_ranks import Failed  # the class of `__main__` could not be unpickled

    directory = Path(sys.argv[1])
    try:
        function, args = pickle.loads((directory / "task").read_bytes())
        outcome = function(*args)
    except BaseException as exception:
        outcome = Failed(exception)

    launch = LaunchInfo.from_environment()
    rank = int(os.environ.get("LOCAL_RANK", "0")) if launch is None else launch.rank
    temporary = directory / f"{rank}.part"
    temporary.write_bytes(pickle.dumps(outcome))
    temporary.rename(directory / str(rank))
    if isinstance(outcome, Failed):
        sys.exit(1)


if __name__ == "__main__":
    main()

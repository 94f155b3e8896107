"""Runs a function on ranks of Horovod, started as users start them, and collects what each rank returns or raises.

    outcomes = run_horovod("mpirun", function, *args)

The function stands at the top level of a module. It runs in each rank of ``horovodrun`` or ``mpirun``. With "python",
it runs in one process at first, and again in the ranks that ``fit`` starts.
"""

import importlib
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.horovod_launch import BIN, start_of
from lightning_strategies_ext.horovod.launch import Launch
from tests.support.ranks import LIMIT_S, SELDOM, run_command


def run_horovod(
    launcher: str, function: Callable[..., Any], *args: Any, num_ranks: int = 2, timeout_s: float = LIMIT_S
) -> list[Any]:
    """Returns each rank's value.

    Raises:
        AssertionError: If a rank raises or does not end.
    """
    output, outcomes = try_horovod(launcher, function, *args, num_ranks=num_ranks, timeout_s=timeout_s)
    failed = [outcome for _, outcome in sorted(outcomes.items()) if isinstance(outcome, Failed)]
    if failed or len(outcomes) < num_ranks:
        traces = "\n".join(failure.trace for failure in failed)
        raise AssertionError(f"ranks {sorted(outcomes)} of {num_ranks} have ended:\n{traces}\n{output}")
    return [outcome for _, outcome in sorted(outcomes.items())]


def try_horovod(
    launcher: str, function: Callable[..., Any], *args: Any, num_ranks: int = 2, timeout_s: float = LIMIT_S
) -> tuple[str, dict[int, Any]]:
    """Returns the output, and what each rank that got so far has returned, or the :class:`Failed` of what it raised."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "arguments").write_bytes(pickle.dumps(args))
        # Ranks that are killed leave the files there that Open MPI shares memory through.
        start = start_of(launcher, num_ranks, directory)
        name = f"{function.__module__}:{function.__qualname__}"
        environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        environment |= SELDOM if launcher != "mpirun" else {}
        environment |= {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
        result = run_command(
            *start, sys.executable, "-m", __name__, name, directory, env=environment, timeout_s=timeout_s
        )
        outcomes = {
            int(path.name): pickle.loads(path.read_bytes())
            for path in Path(directory).iterdir()
            if path.name.isdecimal()
        }
    return result.stdout, outcomes


class Failed:
    """What a rank raised.

    Args:
        exception: The exception.
    """

    def __init__(self, exception: BaseException) -> None:
        self.name = type(exception).__name__
        self.text = str(exception)
        self.trace = "".join(traceback.format_exception(exception))


def main() -> None:
    """Runs in each rank."""
    from tests.support.horovod_ranks import Failed  # and not `__main__`'s, which nobody else could unpickle

    name, directory = sys.argv[1:]
    module, _, function = name.partition(":")
    args = pickle.loads(Path(directory, "arguments").read_bytes())
    try:
        outcome = getattr(importlib.import_module(module), function)(*args)
    except BaseException as exception:
        outcome = Failed(exception)

    launch = Launch.find()
    rank = int(os.environ.get("LOCAL_RANK", "0")) if launch is None else launch.rank
    temporary = Path(directory, f"{rank}.part")
    temporary.write_bytes(pickle.dumps(outcome))
    temporary.rename(Path(directory, str(rank)))
    if isinstance(outcome, Failed):
        sys.exit(1)


if __name__ == "__main__":
    main()

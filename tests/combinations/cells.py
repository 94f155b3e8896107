"""Runs cells: ranks run many cells, and are started again after a cell that makes them exit.

found = run_cells("ddp_ext", [("EMA",), ("accumulation", "EMA")])
found["accumulation", "EMA"]  # by rank: observations, or the failure
"""

import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy

from lightning_strategies_ext import (
    DataParallelStrategy,
    DDPRayStrategy,
    DDPSpawnStrategy,
    DDPStrategy,
    HorovodStrategy,
    fabric,
)
from tests.combinations.features import setup_of
from tests.combinations.training import NUM_RANKS, train
from tests.combinations.training_fabric import train_under_fabric
from tests.support.horovod_ranks import try_horovod
from tests.support.ranks import outcomes_of_ranks

#: Name of a strategy of this package, for example "ddp_ext".
EXT = "lightning_strategies_ext"
Cell = tuple[str, ...]
#: Strategies whose ranks all run the function of a cell. Other strategies start their processes, or have one process.
STARTED = ("ddp", "ddp_ext", "fabric ddp_ext")
OVER_HOROVOD = ("horovod_ext", "fabric horovod_ext")


@dataclass
class Failure:
    """An exception of a rank.

    Attributes:
        kind: Name of its class.
        text: Its message.
        module: Module that has raised it.
        trace: Its traceback.
        ends: Whether the ranks had connected, so that they cannot continue with the next cell.
    """

    kind: str
    text: str
    module: str
    trace: str
    ends: bool = True

    @classmethod
    def of(cls, exception: BaseException, ends: bool) -> "Failure":
        frames = list(traceback.walk_tb(exception.__traceback__))
        module = frames[-1][0].f_globals.get("__name__", "") if frames else ""
        trace = "".join(traceback.format_exception(exception))
        return cls(type(exception).__name__, str(exception), module, trace, ends)


def make_strategy(name: str, arguments: dict[str, Any], fault: str | None) -> Any:
    """Creates a strategy for the Trainer by its name; returns "auto" for one device."""
    if fault == "no exchange" and "compression" not in arguments and arguments.get("bucket_cap_mb") != "auto":
        arguments = {**arguments, "ddp_comm_hook": _exchanges_nothing}
    makers: dict[str, Callable[..., Any]] = {
        "ddp": LightningDDPStrategy,
        "ddp_ext": DDPStrategy,
        "ddp_spawn_ext": DDPSpawnStrategy,
        "ddp_fork_ext": lambda **kwargs: DDPSpawnStrategy(start_method="fork", **kwargs),
        "ddp_spawn_elastic_ext": lambda **kwargs: DDPSpawnStrategy(elastic=True, **kwargs),
        "ddp_ray_ext": lambda **kwargs: DDPRayStrategy(num_workers=2, num_cpus_per_worker=0.5, **kwargs),
        "ddp_ray_elastic_ext": lambda **kwargs: DDPRayStrategy(
            elastic=True, num_workers=2, num_cpus_per_worker=0.5, **kwargs
        ),
        "dp_ext": DataParallelStrategy,
        "horovod_ext": HorovodStrategy,
        "one device": lambda **_: "auto",
        "fabric ddp_ext": fabric.DDPStrategy,
        "fabric dp_ext": fabric.DataParallelStrategy,
        "fabric horovod_ext": fabric.HorovodStrategy,
        "fabric one device": lambda **_: "auto",
    }
    return makers[name](**arguments)


def _exchanges_nothing(state: object, bucket: Any) -> Any:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _devices(strategy: str) -> Any:
    if strategy.endswith("one device"):
        return 1
    return "auto" if strategy in OVER_HOROVOD or "ray" in strategy else NUM_RANKS


def run_one(strategy: str, cell: Cell, directory: str, fault: str | None) -> Any:
    """Runs a cell in this rank; returns the observations, or a :class:`Failure`."""
    setup = setup_of(cell, strategy)
    arguments = {} if strategy.endswith("one device") else setup.strategy
    made: list[Any] = []

    def make() -> Any:
        made.append(make_strategy(strategy, arguments, fault))
        return made[-1]

    try:
        if strategy.startswith("fabric "):
            return train_under_fabric(setup, make, _devices(strategy))
        return train(setup, make, _devices(strategy), Path(directory), None if fault == "no exchange" else fault)
    except Exception as exception:
        return Failure.of(exception, any(getattr(each, "has_joined", each != "auto") for each in made))
    finally:
        torch.compiler.reset()


def run_all(strategy: str, cells: list[tuple[int, Cell]], directory: str, fault: str | None) -> None:
    """Runs cells in this rank, one after the other, and writes the results to files; stops after a failed cell."""
    from lightning_strategies_ext.horovod.launch_info import LaunchInfo

    if strategy not in (*STARTED, *OVER_HOROVOD):  # this process is no rank; its strategy starts the ranks, or has none
        for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    launch = LaunchInfo.from_environment() if strategy in OVER_HOROVOD else None
    for number, cell in cells:
        outcome = run_one(strategy, cell, f"{directory}/checkpoints-{number}", fault)
        rank = _rank() if launch is None else launch.rank
        torch.save(outcome, Path(directory, f"{number}-{rank}.part"))
        Path(directory, f"{number}-{rank}.part").rename(Path(directory, f"{number}-{rank}"))
        if isinstance(outcome, Failure) and outcome.ends and strategy in (*STARTED, *OVER_HOROVOD):
            return  # the other ranks may wait for this rank, or may have detected its failure


def _rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def run_cells(strategy: str, cells: list[Cell], fault: str | None = None) -> dict[Cell, list[Any]]:
    """Returns the observations of each rank in each cell, or its :class:`Failure`."""
    found: dict[Cell, list[Any]] = {}
    remaining = list(enumerate(cells))
    num_ranks = NUM_RANKS if strategy in (*STARTED, *OVER_HOROVOD) else 1
    while remaining:
        with tempfile.TemporaryDirectory() as directory:
            arguments = strategy, remaining, directory, fault
            timeout_s = 120.0 + 30.0 * len(remaining)
            if strategy in OVER_HOROVOD:
                output, _ = try_horovod("mpirun", run_all, *arguments, timeout_s=timeout_s)
                rank_errors = [output] * num_ranks
            else:
                ranks = outcomes_of_ranks(run_all, *arguments, world_size=num_ranks, timeout_s=timeout_s)
                rank_errors = [str(rank) for rank in ranks]
            done = 0
            for number, cell in remaining:
                paths = [Path(directory, f"{number}-{rank}") for rank in range(num_ranks)]
                if not all(path.exists() for path in paths) and done and not any(path.exists() for path in paths):
                    break
                found[cell] = [
                    torch.load(path, weights_only=False)
                    if path.exists()
                    else Failure("ended", "the process of this rank has exited", "", rank_errors[rank])
                    for rank, path in enumerate(paths)
                ]
                done += 1
                if any(isinstance(outcome, Failure) and outcome.ends for outcome in found[cell]) and num_ranks > 1:
                    break
        remaining = remaining[done:]
    return found

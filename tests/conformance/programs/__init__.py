"""Programs for features without cases in torch's wheel. Results over gloo and over ``shm`` must be bitwise identical.

A program is a function that every rank calls after the creation of the default group. It returns its results. Programs
sum over two ranks, or sum integers, because backends add more numbers in different orders.
"""

import importlib
import os
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_strategies_ext.torch_distributed import process_group

MODULES = ("functional", "dtensors", "fully_sharded", "data_parallel", "optimizers", "checkpoints", "groups")


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        function: Function that each rank calls.
        world_size: Number of ranks.
    """

    function: Callable[[], Any]
    world_size: int


_programs: dict[str, Program] = {}


def program(world_size: int = 2) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Decorates a function that is a program; the name of the program contains its module and its function."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        _programs[f"{function.__module__.rpartition('.')[2]}.{function.__name__}"] = Program(function, world_size)
        return function

    return add


def all_programs() -> dict[str, Program]:
    """Returns all programs, by name."""
    for name in MODULES:
        importlib.import_module(f"{__name__}.{name}")
    return _programs


def run(backend: str, name: str) -> tuple[str, Any]:
    """Runs a program on one rank: creates the default group and calls the program's function.

    Returns:
        ``("passed", result)``, or ``("skipped", reason)`` if this version of torch lacks a feature.
    """
    chosen = all_programs()[name]
    dist.init_process_group(backend, rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(7 + dist.get_rank())
    try:
        if backend == "shm":
            from lightning_strategies_ext.shm.process_group import ShmProcessGroup

            group = dist.distributed_c10d._get_default_group()
            assert isinstance(group, ShmProcessGroup), f"the group must have the backend 'shm', but is {group!r}"
        return "passed", chosen.function()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    finally:
        process_group.stop()


def needed(where: str) -> Any:
    """Returns an object of torch that some versions lack, or have in a different module.

    Args:
        where: Possible locations ``module:name``, separated by spaces.

    Raises:
        unittest.SkipTest: If the object is in none of the locations.
    """
    for target in where.split():
        module, _, name = target.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise unittest.SkipTest(f"torch {torch.__version__} has no {where}")


def need_gloo_to_reduce_right() -> None:
    """Skips a program that averages by a reduce-scatter if gloo does not support that.

    Raises:
        unittest.SkipTest: If gloo raises an error (torch 2.5), or ignores the operation and sums (torch 2.7 and 2.8).
    """
    part = torch.empty(1)
    try:
        ones = torch.ones(dist.get_world_size())
        dist.reduce_scatter_tensor(part, ones, dist.ReduceOp.AVG, group=dist.new_group(backend="gloo"))
    except RuntimeError as error:
        raise unittest.SkipTest(f"gloo of torch {torch.__version__} cannot average: {error}") from None
    if part.item() != 1:
        raise unittest.SkipTest(f"gloo of torch {torch.__version__} sums instead of averaging")


def difference(result: Any, expected: Any, where: str = "") -> str:
    """Describes the first difference of two results, if any; compares tensors bit by bit."""
    if type(result) is not type(expected):
        return f"{where or 'the result'}: {type(result).__name__}, not {type(expected).__name__}"
    if isinstance(result, torch.Tensor):
        if (result.dtype, result.shape) != (expected.dtype, expected.shape):
            return f"{where}: {result.dtype} {tuple(result.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        is_same = torch.equal(_bits(result), _bits(expected))
        return (
            ""
            if is_same
            else f"{where}: different bits ({result.flatten()[:4].tolist()}, {expected.flatten()[:4].tolist()})"
        )
    if isinstance(result, dict):
        if result.keys() != expected.keys():
            return f"{where}: different keys"
        return next(
            (found for key in result if (found := difference(result[key], expected[key], f"{where}.{key}"))), ""
        )
    if isinstance(result, (list, tuple)):
        if len(result) != len(expected):
            return f"{where}: {len(result)} items, not {len(expected)}"
        pairs = enumerate(zip(result, expected, strict=True))
        return next((found for index, pair in pairs if (found := difference(*pair, f"{where}[{index}]"))), "")
    return "" if result == expected else f"{where}: {result!r}, not {expected!r}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)

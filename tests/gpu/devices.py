"""The devices that the tests of this folder run on, and ranks that have one each.

On a machine without a GPU, ``LSE_GPU_TESTS_ON=cpu`` runs the bodies of those tests that a CPU can run, over gloo: this
shows that they run, and nothing else.
"""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_strategies_ext  # noqa: F401 - gives the names where the package is not installed, only on the path
from tests.support.ranks import run_ranks
from tests.support.shared_gpu import pass_for_own_host

ON_CPU = os.environ.get("LSE_GPU_TESTS_ON") == "cpu"
ACCELERATOR, BACKEND, DEVICE_TYPE = ("cpu", "gloo", "cpu") if ON_CPU else ("gpu", "nccl", "cuda")
#: By NVML, as Lightning has torch count them: this process touches no GPU, and its forks may.
NUM_GPUS = torch.cuda.device_count()

cuda_only = pytest.mark.skipif(ON_CPU, reason="LSE_GPU_TESTS_ON=cpu, and this is of GPUs only")
two_gpus = pytest.mark.skipif(
    not ON_CPU and NUM_GPUS < 2, reason=f"needs two GPUs: torch.cuda.device_count() is {NUM_GPUS}"
)


@dataclass(frozen=True)
class Devices:
    """What a Trainer or Fabric is told of the devices, as keyword arguments."""

    accelerator: str = ACCELERATOR
    devices: int = 1
    num_nodes: int = 1


@dataclass(frozen=True)
class Ranks:
    """Runs the bodies of tests in so many ranks with a device each."""

    world_size: int

    @property
    def devices(self) -> Devices:
        """Two ranks on one GPU pass for two hosts that have one GPU each."""
        is_shared = self.world_size > max(NUM_GPUS, 1)
        return Devices(devices=1, num_nodes=2) if is_shared else Devices(devices=self.world_size)

    def run(self, body: Callable[..., Any], *args: Any, timeout_s: float = 200) -> list[Any]:
        """Calls ``body(where, *args)`` in each rank, ``where`` being arguments for the Trainer; returns the values."""
        return run_ranks(_as_rank, self.devices, body, args, world_size=self.world_size, timeout_s=timeout_s)


def run_main(body: Callable[..., Any], num_devices: int, *args: Any) -> Any:
    """Calls ``body(where, *args)`` in a process that is no rank, and starts its own if it wants any."""
    return run_ranks(_as_main, Devices(devices=num_devices), body, args, world_size=1)[0]


@cache
def why_no_two_ranks() -> str | None:
    """None if two ranks can be had: on two GPUs, or on one, which NCCL allows ranks that name themselves two hosts."""
    if ON_CPU or NUM_GPUS > 1:
        return None
    try:
        run_ranks(_as_rank, Ranks(2).devices, _meets_the_other, (), world_size=2)
    except AssertionError as error:
        return f"needs two GPUs: there is one, and NCCL did not let two ranks share it: {str(error)[-300:]}"
    return None


def _as_rank(devices: Devices, body: Callable[..., Any], args: Any) -> Any:
    if devices.num_nodes > 1:
        rank = os.environ["LOCAL_RANK"]
        os.environ.update(LOCAL_RANK="0", NODE_RANK=rank)
        pass_for_own_host()
    return _call(body, devices, args)


def _as_main(devices: Devices, body: Callable[..., Any], args: Any) -> Any:
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return _call(body, devices, args)


def _call(body: Callable[..., Any], devices: Devices, args: Any) -> Any:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else cuBLAS need not compute the same bits again
    return body(asdict(devices), *args)


def _meets_the_other(where: dict[str, Any]) -> None:
    dist.init_process_group(BACKEND, rank=int(os.environ["NODE_RANK"]), world_size=2)
    total = torch.ones(1, device=DEVICE_TYPE)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.destroy_process_group()

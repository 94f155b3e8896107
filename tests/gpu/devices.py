"""The devices of the tests in this directory, and ranks with one device each.

On a host without a GPU, ``LSE_GPU_TESTS_ON=cpu`` runs the tests that a CPU supports, over gloo. This only verifies that
the code of the tests runs.
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
#: Counted with NVML, as Lightning does: this process must not initialize CUDA, because forked processes use it.
NUM_GPUS = torch.cuda.device_count()

cuda_only = pytest.mark.skipif(ON_CPU, reason="LSE_GPU_TESTS_ON=cpu, but this test requires GPUs")
two_gpus = pytest.mark.skipif(
    not ON_CPU and NUM_GPUS < 2, reason=f"needs two GPUs: torch.cuda.device_count() is {NUM_GPUS}"
)


@dataclass(frozen=True)
class Devices:
    """Arguments of a Trainer or Fabric that select the devices."""

    accelerator: str = ACCELERATOR
    devices: int = 1
    num_nodes: int = 1


@dataclass(frozen=True)
class Ranks:
    """Ranks that run the bodies of tests, with one device each."""

    world_size: int

    @property
    def devices(self) -> Devices:
        """The devices. Two ranks on one GPU are configured as two hosts with one GPU each."""
        is_shared = self.world_size > max(NUM_GPUS, 1)
        return Devices(devices=1, num_nodes=2) if is_shared else Devices(devices=self.world_size)

    def run(self, body: Callable[..., Any], *args: Any, timeout_s: float = 200) -> list[Any]:
        """Calls ``body(where, *args)`` in each rank and returns the values; ``where`` has arguments for the Trainer."""
        return run_ranks(_as_rank, self.devices, body, args, world_size=self.world_size, timeout_s=timeout_s)


def run_main(body: Callable[..., Any], num_devices: int, *args: Any) -> Any:
    """Calls ``body(where, *args)`` in a process that is not a rank, but may start ranks."""
    return run_ranks(_as_main, Devices(devices=num_devices), body, args, world_size=1)[0]


@cache
def two_ranks_skip_reason() -> str | None:
    """Returns why two ranks are not possible; None if there are two GPUs, or NCCL lets two ranks share one GPU."""
    if ON_CPU or NUM_GPUS > 1:
        return None
    try:
        run_ranks(_as_rank, Ranks(2).devices, _join_two_ranks, (), world_size=2)
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
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # otherwise the results of cuBLAS may differ between runs
    return body(asdict(devices), *args)


def _join_two_ranks(where: dict[str, Any]) -> None:
    dist.init_process_group(BACKEND, rank=int(os.environ["NODE_RANK"]), world_size=2)
    total = torch.ones(1, device=DEVICE_TYPE)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.destroy_process_group()

"""The exchange of gradients without DDP's reducer: scripts observe the same values as with the reducer."""

import gc
import logging
import os
import re
import resource
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_strategies_ext.torch_distributed.direct_exchange import LARGE_NUM_BYTES
from lightning_strategies_ext.torch_distributed.distributed_model import DistributedModel
from lightning_strategies_ext.torch_distributed.wrapping import wrap_in_ddp
from tests.support.private_dev_shm import private_shared_memory
from tests.support.ranks import run_ranks, start_command
from tests.torch_distributed.direct_exchange_cases import CASES, WIDTH, Net, batch, gradients

CPU = torch.device("cpu")


@contextmanager
def process_group() -> Iterator[None]:
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("shm", rank=rank, world_size=world_size)
    yield
    dist.destroy_process_group()


def try_all(names: list[str]) -> list[tuple[Any, Any]]:
    found = []
    with process_group():
        for case in CASES:
            if case.__name__ not in names:
                continue
            outcomes = []
            for is_direct in (False, True):

                def wrap(module: nn.Module, is_direct: bool = is_direct, **ddp_kwargs: Any) -> DistributedModel:
                    model = wrap_in_ddp(module, CPU, **ddp_kwargs)
                    if is_direct:
                        model.exchange_directly({})
                    assert model.is_exchanged_directly is is_direct
                    return model

                torch.manual_seed(1)
                try:
                    outcomes.append(case(wrap))
                except BaseException:
                    outcomes.append(traceback.format_exc())
            found.append((outcomes[0], outcomes[1]))
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[tuple[Any, Any]]]:
    names = [case.__name__ for case in CASES]
    of_ranks = run_ranks(try_all, names)
    return {name: [found[index] for found in of_ranks] for index, name in enumerate(names)}


@pytest.mark.processes
@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_two_ranks_have_bitwise_the_gradients_of_the_reducer(
    name: str, outcomes: dict[str, list[tuple[Any, Any]]]
) -> None:
    for with_reducer, without in outcomes[name]:
        assert "Traceback" not in f"{with_reducer}{without}", f"{with_reducer}\n{without}"
        if isinstance(with_reducer, list):
            assert len(with_reducer) == len(without) > 0
            for direct, reduced in zip(without, with_reducer, strict=True):
                torch.testing.assert_close(direct, reduced, rtol=0, atol=0)
        else:
            assert str(with_reducer) == str(without)


# --- more ranks, and different ranks ---


def in_different_orders() -> tuple[list[Tensor], list[Tensor]]:
    with process_group():
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        module = Net()
        # The mean of the gradients that each rank computes in its order.
        expected: list[Tensor] = []
        for number in range(2):
            module.zero_grad()
            module(batch(number), backwards=rank == 1).backward()
            for each in gradients(module):
                dist.all_reduce(each)
                expected.append(each / size)
        torch.manual_seed(1)
        model = wrap_in_ddp(Net(), CPU, broadcast_buffers=False)
        model.exchange_directly({})
        found = []
        for number in range(2):
            model.zero_grad()
            model(batch(number), backwards=rank == 1).backward()
            found += gradients(model)
    return expected, found


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_compute_layers_of_equal_shape_in_different_orders(world_size: int) -> None:
    assert 4 * WIDTH * WIDTH >= LARGE_NUM_BYTES
    for expected, found in run_ranks(in_different_orders, world_size=world_size):
        for value, right in zip(found, expected, strict=True):
            torch.testing.assert_close(value, right)


# --- memory ---


def without_shared_memory_on_one_rank() -> tuple[list[str], list[Tensor], list[Tensor]]:
    found = []
    with process_group(), messages() as messages_of_rank:
        for is_direct in (False, True):
            torch.manual_seed(1)
            model = wrap_in_ddp(Net(), CPU)
            if is_direct:
                if dist.get_rank() == 1:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
                model.exchange_directly({})
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            model(batch()).backward()
            found.append(gradients(model))
    return [*messages_of_rank], *found


@pytest.mark.processes
def test_the_reducer_exchanges_if_a_rank_cannot_reserve_shared_memory() -> None:
    for messages_of_rank, with_reducer, without in run_ranks(without_shared_memory_on_one_rank):
        [message] = messages_of_rank
        assert re.search(r"rank 1 cannot reserve \d+ bytes in /dev/shm", message), message
        for direct, reduced in zip(without, with_reducer, strict=True):
            torch.testing.assert_close(direct, reduced, rtol=0, atol=0)


WITH_LITTLE_SHARED_MEMORY = """
import logging, sys, torch, torch.distributed as dist
from lightning_strategies_ext.torch_distributed.wrapping import wrap_in_ddp
logging.basicConfig(level=logging.INFO)
dist.init_process_group("shm", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
model = wrap_in_ddp(torch.nn.Linear(1024, 1024), torch.device("cpu"))
model.exchange_directly({})
model(torch.full((1, 1024), dist.get_rank() + 1.0)).sum().backward()
print(model.module.weight.grad.unique().tolist())
"""


@pytest.mark.processes
@pytest.mark.parametrize(("size", "is_enough"), [("16m", False), ("64m", True)])
def test_half_of_the_shared_memory_is_left_to_others(tmp_path: Path, size: str, is_enough: bool) -> None:
    with private_shared_memory(size) as shared_memory:
        command = [*shared_memory.prefix, sys.executable, "-c", WITH_LITTLE_SHARED_MEMORY, f"file://{tmp_path}/store"]
        processes = [start_command(*command, rank) for rank in range(2)]
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    for output in outputs:
        assert "[1.5]" in output
        assert ("more than half of the free space in /dev/shm" in output) is not is_enough, output


def often_wrapped() -> tuple[int, list[int]]:
    def num_bytes_of_shared_memory() -> int:
        spans = [
            line.split()[0].split("-")
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "/dev/shm/" in line
        ]
        return sum(int(end, 16) - int(begin, 16) for begin, end in spans)

    with process_group():
        used = 0
        num_remaining = []
        for _ in range(3):
            model = wrap_in_ddp(nn.Linear(1024, 1024), CPU)
            model.exchange_directly({})
            model(torch.ones(1, 1024)).sum().backward()
            used = num_bytes_of_shared_memory()
            del model
            gc.collect()
            num_remaining.append(num_bytes_of_shared_memory())
    return used, num_remaining


@pytest.mark.processes
def test_shared_memory_is_freed_with_the_model() -> None:
    for used, num_remaining in run_ranks(often_wrapped):
        assert num_remaining == num_remaining[:1] * 3
        assert used == num_remaining[0] + 2 * 4 * 1024 * 1024, "each rank maps the memory of both"


# --- when the reducer exchanges ---


@contextmanager
def messages() -> Iterator[list[str]]:
    """Collects the log messages of the block at the level INFO."""
    logger = logging.getLogger("lightning_strategies_ext.torch_distributed")
    logger.setLevel(logging.INFO)
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Collect()
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def reasons() -> list[str]:
    compiled = Net()
    compiled.compile()
    with process_group(), messages() as found:
        for module, ddp_kwargs in (
            (Net(), {"find_unused_parameters": True}),
            (Net(), {"static_graph": True}),
            (Net(), {"bucket_cap_mb": 1.0}),
            (Net().to(torch.bfloat16), {}),
            (nn.Sequential(nn.Embedding(4, 4, sparse=True)), {}),
            (compiled, {}),
        ):
            model = wrap_in_ddp(module, CPU, **ddp_kwargs)
            model.exchange_directly(ddp_kwargs)
            assert not model.is_exchanged_directly
        model = wrap_in_ddp(Net(), CPU)
        model.exchange_directly({}, tries_buckets=True)
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        model = wrap_in_ddp(Net(), CPU, process_group=alone)
        model.exchange_directly({"process_group": alone})
    return found


@pytest.mark.processes
def test_a_message_gives_the_reason_why_the_reducer_exchanges() -> None:
    found = run_ranks(reasons)[0]
    expected = [
        "`find_unused_parameters` or `static_graph` is set",
        "`find_unused_parameters` or `static_graph` is set",
        "`bucket_cap_mb=1.0`",
        "a parameter is neither float32 nor float64",
        "gradients may be sparse",
        "a module is compiled",
        "bucket sizes are compared",
        "there is one rank",
    ]
    assert found == [f"DDP's reducer exchanges the gradients: {each}." for each in expected]

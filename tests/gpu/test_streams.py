"""Work in side streams is ordered after the training's kernels, and does not accumulate memory."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from lightning_strategies_ext._system.gpu_sync import copy_to_host, side_stream
from lightning_strategies_ext.torch_distributed.compression.codecs import Residuals
from lightning_strategies_ext.torch_distributed.wrapping import rewrap_in_ddp, wrap_in_ddp
from tests.gpu.devices import Ranks, cuda_only

pytestmark = [pytest.mark.processes, cuda_only]

#: GPU cycles that take about half a second.
LONG = 10**9
#: Number of elements, so large that the allocator does not reuse a part of a split block.
SIZE = 1 << 22


def free_a_residual(where: dict[str, Any]) -> float:
    device = torch.device("cuda", 0)
    parameter, residuals = torch.zeros(SIZE, device=device), Residuals()
    residuals.distribute(parameter, torch.ones(SIZE, device=device), 1)
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        moved = residuals.flat([parameter], parameter)
    others = [torch.full((SIZE,), 7.0, device=device) for _ in range(3)]  # in freed memory, if there is any
    torch.cuda.synchronize()
    assert len(others) == 3
    return (moved - 1).abs().max().item()


def test_the_memory_of_a_residual_is_kept_until_the_exchange_has_used_it() -> None:
    assert Ranks(1).run(free_a_residual) == [0.0]


def wrap_often(where: dict[str, Any]) -> tuple[float, int, int]:
    fabric = Fabric(strategy="ddp_ext", **where)
    fabric.launch()
    module = nn.Linear(SIZE // 1024, 1024, bias=False).to(fabric.device)
    model, reserved = wrap_in_ddp(module, fabric.device), []
    for number in range(12):
        torch.cuda._sleep(LONG // 10)
        with torch.no_grad():
            module.weight.fill_(number)  # like an optimizer step that the GPU has not executed yet
        rewrap_in_ddp(model, fabric.device)
        assert (module.weight == number).all().item()
        model(torch.ones(1, SIZE // 1024, device=fabric.device)).sum().backward()
        reserved.append(torch.cuda.memory_reserved())
    dist.barrier()
    return module.weight.detach().max().item(), reserved[3], reserved[-1]


def test_a_rebuild_of_ddp_keeps_the_last_steps_weights_and_needs_no_more_memory(ranks: Ranks) -> None:
    for weight, early, late in ranks.run(wrap_often):
        assert weight == 11
        assert late == early


def copy_twice(where: dict[str, Any]) -> list[bool]:
    tensors = [torch.rand(1000, 500, device="cuda"), torch.rand(8, 3, device="cuda").t(), torch.ones((), device="cuda")]
    first = copy_to_host(tensors, [None] * 3, may_pin=True)
    for tensor in tensors:
        torch.cuda._sleep(LONG // 10)
        tensor.mul_(2)
    again = copy_to_host(tensors, first, may_pin=True)
    same = [torch.equal(one, other.cpu()) for one, other in zip(again, tensors, strict=True)]
    return [*same, all(each.is_pinned() for each in again), again[1].stride() == tensors[1].stride()]


def test_a_commit_is_copied_to_pinned_memory() -> None:
    assert Ranks(1).run(copy_twice) == [[True] * 5]

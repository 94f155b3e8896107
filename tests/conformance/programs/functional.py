"""Functional collectives, eager, differentiated and compiled; differentiable collectives of torch.distributed.nn."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor

from tests.conformance.programs import needed, program

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a tensor that is different on each rank."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 7 + dist.get_rank() + 1).to(dtype)


@program()
def every_collective() -> Any:
    group = list(range(dist.get_world_size()))
    return {
        str(dtype): _waited(
            [
                functional.all_reduce(ramp(4, 3, dtype=dtype), "sum", group),
                functional.all_reduce(ramp(4, 3, dtype=dtype), "max", group),
                functional.all_gather_tensor(ramp(4, 3, dtype=dtype), gather_dim=1, group=group),
                functional.reduce_scatter_tensor(ramp(4, 6, dtype=dtype), "sum", scatter_dim=1, group=group),
                functional.broadcast(ramp(4, 3, dtype=dtype), 1, group),
                functional.all_to_all_single(ramp(4, 3, dtype=dtype), None, None, group),
            ]
        )
        for dtype in DTYPES
    }


@program()
def coalesced() -> Any:
    tensors = [torch.randn(3, 2), torch.randn(5), torch.randn(2, 2, 2)]
    group = dist.group.WORLD
    results = [
        *functional.all_reduce_coalesced([*tensors], "sum", group),
        *functional.all_gather_into_tensor_coalesced([*tensors], group),
        *functional.reduce_scatter_tensor_coalesced([torch.randn(4, 3), torch.randn(2)], "sum", [0, 0], group),
    ]
    return _waited(results)


@program(world_size=3)
def uneven_parts() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    sends = [rank + other for other in range(size)]
    receives = [other + rank for other in range(size)]
    return _waited([functional.all_to_all_single(ramp(sum(sends), 2), receives, sends, dist.group.WORLD)])


@program()
def not_contiguous() -> Any:
    group = dist.group.WORLD
    results = [
        functional.all_reduce(torch.randn(4, 6).t(), "sum", group),
        functional.all_gather_tensor(torch.randn(4, 6)[:, ::2], 0, group),
        functional.reduce_scatter_tensor(torch.randn(6, 4).t(), "sum", 0, group),
    ]
    return _waited(results)


@program()
def gradients() -> Any:
    gather = needed("torch.distributed._functional_collectives:all_gather_tensor_autograd")
    reduce_scatter = needed("torch.distributed._functional_collectives:reduce_scatter_tensor_autograd")
    exchange = needed("torch.distributed._functional_collectives:all_to_all_single_autograd")
    group = dist.group.WORLD
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda tensor: gather(tensor, 0, group),
        lambda tensor: reduce_scatter(tensor, "sum", 0, group),
        lambda tensor: exchange(tensor, [2, 2], [2, 2], group),
    ]
    return [_value_and_gradient(call, torch.randn(4, 3)) for call in calls]


@program()
def gradients_of_distributed_nn() -> Any:
    calls: list[Callable[[Tensor], Any]] = [
        differentiable.all_reduce,
        lambda tensor: torch.stack(list(differentiable.all_gather(tensor))),
        lambda tensor: differentiable.broadcast(tensor, 1),
        lambda tensor: (
            differentiable.reduce(tensor, 0) * (dist.get_rank() == 0)
        ),  # the result on other ranks depends on the backend
        lambda tensor: torch.stack(list(differentiable.gather(tensor, 1))),
        lambda tensor: differentiable.scatter([tensor, tensor * 2], 0),
        lambda tensor: differentiable.reduce_scatter(torch.empty(2, 3), list(tensor.split(2))),
        lambda tensor: torch.cat(
            list(differentiable.all_to_all([torch.empty(2, 3) for _ in "ab"], list(tensor.split(2))))
        ),
        lambda tensor: differentiable.all_to_all_single(torch.empty(4, 3), tensor),
    ]
    return [_value_and_gradient(call, torch.randn(4, 3)) for call in calls]


@program()
def traced() -> Any:
    return _compiled("aot_eager")


@program()
def compiled() -> Any:
    return _compiled("inductor")


@program()
def compiled_collectives_of_torch_distributed() -> Any:
    """Compiles a function with ``dist.all_reduce`` and others, which torch replaces with functional collectives."""

    def step(tensor: Tensor) -> Tensor:
        tensor = tensor * 2
        dist.all_reduce(tensor)
        gathered = torch.empty(tensor.shape[0] * 2, tensor.shape[1])
        dist.all_gather_into_tensor(gathered, tensor)
        part = torch.empty_like(tensor)
        dist.reduce_scatter_tensor(part, gathered)
        return part + 1

    return torch.compile(step, backend="aot_eager")(torch.randn(4, 3))


def _compiled(backend: str) -> Any:
    group = dist.group.WORLD

    def step(tensor: Tensor) -> list[Tensor]:
        tensor = tensor.sin()
        total = functional.all_reduce(tensor, "sum", group)
        rows = functional.all_gather_tensor(tensor + 1, 0, group)
        part = functional.reduce_scatter_tensor(rows, "sum", 0, group)
        swapped = functional.all_to_all_single(tensor, None, None, group)
        both = functional.all_reduce_coalesced([tensor, tensor * 2], "sum", group)
        return [total * 2, rows.cos(), part + total, swapped, *both]

    return _waited(torch.compile(step, backend=backend, fullgraph=True)(torch.randn(4, 3)))


def _waited(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors after their collectives have completed."""
    return [functional.wait_tensor(tensor) + 0 for tensor in tensors]


def _value_and_gradient(call: Callable[[Tensor], Tensor], tensor: Tensor) -> list[Tensor | None]:
    tensor.requires_grad_()
    value = call(tensor)
    (value * torch.arange(1.0, value.numel() + 1).reshape(value.shape)).sum().backward()
    return [value.detach(), tensor.grad]

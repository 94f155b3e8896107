"""DTensor: all changes of placement, on one and on two mesh dimensions; operators, gradients, tensor parallelism."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.conformance.programs import need_gloo_to_reduce_right, program

PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max"))


@program()
def distributed() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(5, 3)  # different on each rank; the tensor of rank 0 counts
    return [_parts(distribute_tensor(whole, mesh, [to])) for to in (Replicate(), Shard(0), Shard(1))]


@program()
def redistributed() -> Any:
    need_gloo_to_reduce_right()
    mesh = init_device_mesh("cpu", (2,))
    return {
        f"{begin} to {end}": _redistributed(mesh, [begin], [end])
        for begin, end in itertools.product(PLACEMENTS, (Replicate(), Shard(0), Shard(1)))
    }


@program(world_size=4)
def redistributed_in_two_dimensions() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    pairs = list(itertools.product((Replicate(), Shard(0), Shard(1), Partial()), repeat=2))
    ends = list(itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2))
    return {
        f"{begin} to {end}": _redistributed(mesh, begin, end)
        for begin, end in itertools.product(pairs, ends)
        if Shard(0) in begin or Partial() in begin
    }


@program()
def redistributed_asynchronously() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    shards = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    return [shards.redistribute(mesh, [to], async_op=True).to_local() for to in (Replicate(), Shard(1))]


@program()
def operators() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    a, b = (distribute_tensor(torch.randn(6, 6), mesh, [Shard(dim)]) for dim in (0, 1))
    results = [a + b, a @ b, b @ a, (a * b).sum(), a.mean(dim=0), a.softmax(dim=1), b.softmax(dim=1), a.max(), a.norm()]
    return [result.full_tensor() for result in results]


@program()
def gradients() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for begin, end in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
        tensor = distribute_tensor(torch.randn(4, 4), mesh, [begin]).requires_grad_()
        (tensor.redistribute(mesh, [end]) ** 2).sum().full_tensor().backward()
        assert isinstance(tensor.grad, DTensor)
        found.append([str(tensor.grad.placements), tensor.grad.full_tensor()])
    return found


@program()
def module_of_dtensors() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    model = distribute_module(nn.Linear(4, 4), mesh)
    output = model(distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]))
    output.sum().backward()
    return [output.full_tensor(), *[parameter.grad.full_tensor() for parameter in model.parameters()]]


@program()
def tensor_parallel() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    losses = [_step(model, optimizer, torch.randn(4, 8)) for _ in range(3)]
    return [losses, {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}]


@program()
def sequence_parallel() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=True),
    }
    parallelize_module(model, mesh, plan)
    output = model(torch.randn(2, 4, 8))
    output.sum().backward()
    return [output, *[parameter.grad.full_tensor() for parameter in model.parameters()]]


@program()
def parallel_loss() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    logits = distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 5]))
        loss.backward()
    assert isinstance(logits.grad, DTensor)
    return [loss.full_tensor(), logits.grad.full_tensor()]


@program()
def all_reduce_of_a_dtensor_is_refused_alike() -> Any:
    tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    try:
        dist.all_reduce(tensor)
    except (NotImplementedError, AssertionError):  # RuntimeError in torch 2.8 and earlier
        return "refused"
    return _parts(tensor)


@program()
def compiled() -> Any:
    mesh = init_device_mesh("cpu", (2,))

    def step(tensor: torch.Tensor) -> torch.Tensor:
        shards = DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
        return (shards.redistribute(mesh, [Replicate()]) * 2).to_local()

    return torch.compile(step, backend="aot_eager", fullgraph=True)(torch.randn(3, 2))


def _redistributed(mesh: DeviceMesh, begin: Any, end: Any) -> list[torch.Tensor]:
    torch.manual_seed(11 + dist.get_rank())
    # Integers, because the backend determines the order in which it adds the values of four ranks.
    tensor = DTensor.from_local(torch.randint(-50, 50, (3, 5)).float(), mesh, begin, run_check=True)
    changed = tensor.redistribute(mesh, end)
    return [*_parts(changed), changed.full_tensor()]


def _parts(tensor: DTensor) -> list[torch.Tensor]:
    return [tensor.to_local(), tensor.full_tensor()]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = (model(batch) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

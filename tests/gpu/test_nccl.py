"""``ddp_ext`` creates an NCCL process group, and its collectives use tensors on the device."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_strategies_ext import DDPStrategy
from tests.gpu.devices import BACKEND, DEVICE_TYPE, Ranks, cuda_only
from tests.support.models import fit

pytestmark = pytest.mark.processes


def touch_the_device(where: dict[str, Any]) -> tuple[bool, float]:
    return torch.cuda.is_initialized(), torch.ones(1, device=DEVICE_TYPE).item()


def test_the_process_that_ranks_are_forked_from_has_used_no_gpu(ranks: Ranks) -> None:
    assert ranks.run(touch_the_device) == [(False, 1.0)] * ranks.world_size


def launched(where: dict[str, Any]) -> Fabric:
    fabric = Fabric(strategy="ddp_ext", **where)
    fabric.launch()
    assert dist.get_backend() == BACKEND
    assert fabric.device.type == DEVICE_TYPE
    return fabric


def group_of_trainer(where: dict[str, Any]) -> tuple[Any, ...]:
    trainer, model = fit("ddp_ext", max_steps=1, **where)
    strategy = trainer.strategy
    return type(strategy), dist.get_backend(), dist.get_world_size(), strategy.root_device.type, model.device.type


def test_a_trainer_of_any_size_joins_nccl_and_returns_the_module_on_the_cpu(ranks: Ranks) -> None:
    assert ranks.run(group_of_trainer) == [(DDPStrategy, BACKEND, ranks.world_size, DEVICE_TYPE, "cpu")] * (
        ranks.world_size
    )


OBJECTS = [True, None, {"path": "best.ckpt", "step": 3}, list(range(5000)), torch.arange(3)]


def broadcast_objects(where: dict[str, Any]) -> list[Any]:
    fabric = launched(where)
    own = [[fabric.global_rank, obj] for obj in OBJECTS]  # rank 0's object on all ranks, with one or two collectives
    received = [fabric.broadcast(pair) for pair in own]
    with pytest.raises(RuntimeError, match="Broadcast from rank 0 failed"):
        fabric.broadcast(lambda: 0)
    fabric.barrier("after the broadcasts")
    return received


def test_objects_are_broadcast_and_one_that_cannot_be_fails_on_every_rank(ranks: Ranks) -> None:
    for received in ranks.run(broadcast_objects):
        assert str(received) == str([[0, obj] for obj in OBJECTS])


def reduce_tensors(where: dict[str, Any]) -> list[Any]:
    fabric = launched(where)
    number, device = fabric.global_rank + 1, fabric.device
    tensors: list[tuple[torch.Tensor, str]] = [
        (torch.full((3,), float(number), device=device), "mean"),
        (torch.tensor(float(number), dtype=torch.bfloat16, device=device), "sum"),
        (torch.tensor([number, 2**20], dtype=torch.int32, device=device), "mean"),
        (torch.tensor([True, number == 1], device=device), "sum"),
        (torch.tensor([number], dtype=torch.uint8, device=device), "max"),
        (torch.arange(6.0, device=device).reshape(2, 3).t() * number, "sum"),
        (torch.tensor([1 + 1j], device=device) * number, "sum"),
    ]
    reduced = [fabric.all_reduce(tensor, reduce_op=op) for tensor, op in tensors]
    assert {tensor.device.type for tensor in reduced} == {DEVICE_TYPE}
    votes = [fabric.strategy.reduce_boolean_decision(number == 1, all=every) for every in (True, False)]
    return [*[tensor.tolist() for tensor in reduced], votes]


def test_reductions_mean_on_the_device_what_they_mean_elsewhere(ranks: Ranks) -> None:
    n = ranks.world_size
    total = float(n * (n + 1) // 2)
    expected = [
        [total / n] * 3,
        total,
        [total / n, float(2**20)],
        [n, 1],
        [n],
        (torch.arange(6.0).reshape(2, 3).t() * total).tolist(),
        [total * (1 + 1j)],
        [n == 1, True],
    ]
    assert ranks.run(reduce_tensors) == [expected] * n


def gather_tensors(where: dict[str, Any]) -> list[Any]:
    fabric = launched(where)
    number = float(fabric.global_rank + 1)
    tensor = torch.tensor([number, number], device=fabric.device, requires_grad=True)
    gathered = fabric.all_gather(tensor, sync_grads=True)
    (gathered * number).sum().backward()  # each rank receives the sum over ranks of the gradients of its slice
    flags = fabric.all_gather(torch.tensor([number == 1], device=fabric.device))
    assert tensor.grad is not None
    return [gathered.tolist(), tensor.grad.tolist(), flags.flatten().tolist()]


def test_all_gather_supports_gradients_and_dtypes_that_nccl_lacks(ranks: Ranks) -> None:
    n = ranks.world_size
    total = float(n * (n + 1) // 2)
    expected = [[[rank + 1.0] * 2 for rank in range(n)], [total] * 2, [rank == 0 for rank in range(n)]]
    assert ranks.run(gather_tensors) == [expected] * n


def broadcast_tensors_of_the_host(where: dict[str, Any]) -> list[Any]:
    fabric = launched(where)
    number = fabric.global_rank + 1
    tensors = [
        torch.arange(6.0).reshape(2, 3).t() * number,
        torch.tensor(number, dtype=torch.int16),
        torch.tensor([number == 1, True]),
        torch.tensor([], dtype=torch.float64),
        torch.full((2, 2, 2, 2), number, dtype=torch.bfloat16).to(memory_format=torch.channels_last),
    ]
    fabric.strategy.collectives.broadcast_tensors(tensors, 0)
    return [tensor.tolist() for tensor in tensors]


def test_tensors_in_host_memory_are_broadcast(ranks: Ranks) -> None:
    expected = [[[0, 3], [1, 4], [2, 5]], 1, [True, True], [], [[[[1, 1]] * 2] * 2] * 2]
    assert ranks.run(broadcast_tensors_of_the_host) == [expected] * ranks.world_size


def reduce_and_gather_tensors_of_the_host(where: dict[str, Any]) -> list[Any]:
    fabric = launched(where)
    number = fabric.global_rank + 1
    mean = fabric.all_reduce(torch.tensor([float(number)]), reduce_op="mean")
    votes = fabric.all_reduce(torch.tensor([True]), reduce_op="sum")
    gathered = fabric.all_gather(torch.tensor([number], dtype=torch.int16))
    collectives = fabric.strategy.collectives
    return [each.tolist() for each in (mean, votes, gathered.flatten(), *collectives.gather_list(torch.ones(2)))]


def test_tensors_in_host_memory_are_reduced_and_gathered(ranks: Ranks) -> None:
    n = ranks.world_size
    numbers = [rank + 1 for rank in range(n)]
    expected = [[sum(numbers) / n], [n], numbers, *[[1.0, 1.0]] * n]
    assert ranks.run(reduce_and_gather_tensors_of_the_host) == [expected] * n


def use_gloo(where: dict[str, Any]) -> tuple[str, float]:
    _, model = fit(DDPStrategy(process_group_backend="gloo"), max_steps=2, **where)
    return dist.get_backend(), sum(parameter.sum().item() for parameter in model.parameters())


@cuda_only
def test_gloo_trains_on_gpus_with_the_argument(ranks: Ranks) -> None:
    outcomes = ranks.run(use_gloo)
    assert outcomes == [outcomes[0]] * ranks.world_size
    assert outcomes[0][0] == "gloo"

"""Distributed checkpoints: saved and loaded, synchronously and asynchronously, also with a different sharding."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.conformance.programs import needed, program
from tests.conformance.programs.fully_sharded import FULLY_SHARD


@program()
def of_plain_tensors() -> Any:
    with _directory() as path:
        dcp.save({"weight": torch.arange(6.0), "step": 3}, checkpoint_id=path)
        loaded = {"weight": torch.zeros(6), "step": 0}
        dcp.load(loaded, checkpoint_id=path)
        return loaded


@program()
def loaded_with_another_sharding() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    whole = torch.randn(5, 4)
    results = []
    with _directory() as path:
        dcp.save({"weight": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=path)
        placements: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate())
        for placement in placements:
            loaded = {"weight": distribute_tensor(torch.zeros(5, 4), mesh, [placement])}
            dcp.load(loaded, checkpoint_id=path)
            results.append(loaded["weight"].full_tensor())
    assert all(torch.equal(result, whole) for result in results)
    return results


@program()
def of_fully_sharded_training() -> Any:
    with _directory() as path:
        model, optimizer = _model_and_optimizer(seed=3)
        _step(model, optimizer)
        states = get_state_dict(model, optimizer)
        dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=path)
        other, its_optimizer = _model_and_optimizer(seed=4)
        loaded = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
        dcp.load(loaded, checkpoint_id=path)
        set_state_dict(other, its_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        torch.manual_seed(9)
        _step(model, optimizer)
        torch.manual_seed(9)
        _step(other, its_optimizer)
        assert all(torch.equal(a, b) for a, b in zip(_whole(model), _whole(other), strict=True))
        return _whole(other)


@program()
def saved_in_the_background() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    whole = torch.randn(5, 4)
    group = dist.new_group()
    with _directory() as path:
        state = {"weight": distribute_tensor(whole, mesh, [Shard(0)])}
        saving = dcp.async_save(state, checkpoint_id=path, process_group=group)
        total = torch.ones(1000)
        for _ in range(20):  # while another thread uses the other group
            dist.all_reduce(total)
            total /= 2
        saving.result()
        dist.barrier()
        loaded = {"weight": distribute_tensor(torch.zeros(5, 4), mesh, [Shard(1)])}
        dcp.load(loaded, checkpoint_id=path)
    return [loaded["weight"].full_tensor(), total]


def _model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 3))
    needed(FULLY_SHARD)(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    (model(torch.randn(4, 8)) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _whole(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor() for parameter in model.parameters() if isinstance(parameter, DTensor)]


@contextmanager
def _directory() -> Iterator[str]:
    """Provides a directory to all ranks, until all ranks have left the block."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path)
    try:
        yield path[0]
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(path[0])

"""FSDP2's ``fully_shard`` and FSDP1, on the CPU: training with each option, and state dicts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.conformance.programs import need_gloo_to_reduce_right, needed, program

FULLY_SHARD = "torch.distributed.fsdp:fully_shard torch.distributed._composable.fsdp:fully_shard"
MIXED_PRECISION = "torch.distributed.fsdp:MixedPrecisionPolicy torch.distributed._composable.fsdp:MixedPrecisionPolicy"


class Model(nn.Module):
    """Two blocks between two layers, with sizes that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(8, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 7)) for _ in range(2))
        self.end = nn.Linear(7, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = self.begin(batch)
        for block in self.blocks:
            batch = batch + block(batch)
        return self.end(batch)


@program()
def trains() -> Any:
    return _trained(_sharded())


@program()
def trains_without_resharding() -> Any:
    return _trained(_sharded(reshard_after_forward=False))


@program()
def trains_in_bf16() -> Any:
    policy = needed(MIXED_PRECISION)(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _trained(_sharded(mp_policy=policy))


@program()
def trains_with_bf16_gradients() -> Any:
    policy = needed(MIXED_PRECISION)(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return _trained(_sharded(mp_policy=policy))


@program()
def trains_with_prefetching() -> Any:
    model = _sharded()
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    return _trained(model)


@program()
def accumulates_gradients() -> Any:
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for is_last in (False, False, True):
        model.set_requires_gradient_sync(is_last)
        (model(torch.randn(4, 8)) ** 2).mean().backward()
    optimizer.step()
    return _whole(model)


@program()
def clips_gradients() -> Any:
    model = _sharded()
    (model(torch.randn(4, 8)) ** 2).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return [norm.full_tensor() if isinstance(norm, DTensor) else norm, _gradients(model)]


@program(world_size=4)
def trains_replicated_and_sharded() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _trained(_sharded(mesh=mesh))


@program(world_size=4)
def trains_sharded_and_tensor_parallel() -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    needed(FULLY_SHARD)(model, mesh=mesh["data"])
    torch.manual_seed(20 + mesh["data"].get_local_rank())  # tensor-parallel ranks have equal batches
    return _trained(model)


@program()
def state_dicts() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict

    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    (model(torch.randn(4, 8)) ** 2).mean().backward()
    optimizer.step()
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_state_dict(model, optimizer, options=full)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {name: tensor + 1 for name, tensor in states[0].items()}, options=spread)
    return [*states, _whole(model)]


@program()
def trains_compiled() -> Any:
    model = _sharded()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return _trained(model)


@program()
def first_version_trains() -> Any:
    return _trained_by_the_first_version("FULL_SHARD")


@program()
def first_version_shards_gradients() -> Any:
    return _trained_by_the_first_version("SHARD_GRAD_OP")


@program()
def first_version_does_not_shard() -> Any:
    return _trained_by_the_first_version("NO_SHARD")


def _trained_by_the_first_version(strategy: str) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(3)
    model = FullyShardedDataParallel(
        Model(),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    torch.manual_seed(20 + dist.get_rank())
    losses = _losses(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    norm = model.clip_grad_norm_(0.1)
    with FullyShardedDataParallel.summon_full_params(model):
        return [losses, norm, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}]


def _sharded(**options: Any) -> Any:
    fully_shard: Callable[..., Any] = needed(FULLY_SHARD)
    need_gloo_to_reduce_right()
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(3)
    model = Model()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    torch.manual_seed(20 + dist.get_rank())
    return model


def _trained(model: nn.Module) -> Any:
    losses = _losses(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return [losses, _gradients(model), _whole(model)]


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(torch.randn(4, 8)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}

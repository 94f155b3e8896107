"""ZeroRedundancyOptimizer with its options, over DDP and under Join; averaging of models."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers, utils
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.conformance.programs import program


@program()
def zero() -> Any:
    model = _model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    return _losses(model, optimizer)


@program()
def zero_with_parameters_as_views() -> Any:
    model = _model()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=0.1, momentum=0.9
    )
    return _losses(model, optimizer)


@program()
def zero_with_groups_of_parameters() -> Any:
    model = _model()
    first, _, third = list(model.children())
    optimizer = ZeroRedundancyOptimizer(first.parameters(), torch.optim.AdamW, lr=0.1)
    optimizer.add_param_group({"params": list(third.parameters()), "lr": 0.01})
    return _losses(model, optimizer)


@program()
def zero_gathers_its_state() -> Any:
    model = _model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    _losses(model, optimizer)
    optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        return optimizer.state_dict()
    return None


@program()
def zero_over_ddp() -> Any:
    model = DistributedDataParallel(_model())
    return _losses(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1))


@program()
def zero_and_ddp_join() -> Any:
    model = DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    with Join([model, optimizer]):
        for _ in range(2 + 3 * dist.get_rank()):
            optimizer.zero_grad()
            (model(torch.randn(4, 8)) ** 2).mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@program()
def local_sgd() -> Any:
    model = _model()
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=1)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    return _losses(model, optimizer)


@program()
def parameters_are_averaged() -> Any:
    model = _model()
    for parameter in model.parameters():
        parameter.data.add_(dist.get_rank())
    utils.average_parameters(iter(model.parameters()), dist.group.WORLD)
    return [parameter.detach() for parameter in model.parameters()]


def _model() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 16), nn.Linear(16, 4))
    torch.manual_seed(20 + dist.get_rank())
    return model


def _losses(model: nn.Module, optimizer: Any) -> list[Tensor]:
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(torch.randn(4, 8)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *[parameter.detach() for parameter in model.parameters()]]

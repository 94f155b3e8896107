"""Policies for a change of the number of ranks, without processes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from lightning_strategies_ext import scale_learning_rates


def sequence(optimizer: Any) -> LRScheduler:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)], [4])


def chain(optimizer: Any) -> LRScheduler:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    return lr_scheduler.ChainedScheduler([first, lr_scheduler.ExponentialLR(optimizer, 0.9)])


SCHEDULERS = {
    "sequence": sequence,
    "chain": chain,
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20),
    "cycles": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12),
}


def rates(name: str, scales_at: int | None) -> list[float]:
    """Returns the learning rates of 12 steps, doubled before a step."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    configs = [SimpleNamespace(scheduler=scheduler)]
    trainer = SimpleNamespace(strategy=SimpleNamespace(optimizers=[optimizer]), lr_scheduler_configs=configs)
    found = []
    for step in range(12):
        if step == scales_at:
            scale_learning_rates(trainer, 2.0)
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("scales_at", [2, 7])
def test_later_learning_rates_are_scaled(name, scales_at):
    before = rates(name, None)
    expected = [*before[:scales_at], *(2 * rate for rate in before[scales_at:])]
    assert rates(name, scales_at) == pytest.approx(expected)

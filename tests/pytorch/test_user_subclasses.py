"""Subclasses of ``DDPStrategy`` that override Lightning's methods work as subclasses of Lightning's class."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext import DDPStrategy
from tests.support.models import MLP, assert_same_bits, loader, make_trainer, state_of
from tests.support.ranks import run_ranks

BASES = [LightningDDPStrategy, DDPStrategy]


def with_own_hook(base: type) -> type:
    """Returns a strategy that registers a communication hook after DDP was created."""

    class WithOwnHook(base):
        def configure_ddp(self) -> None:
            super().configure_ddp()
            self.model.register_comm_hook(None, fp16_compress_hook)

    return WithOwnHook


def with_weight_decay(base: type) -> type:
    """Returns a strategy that shrinks the weights after each optimizer step."""

    class WithWeightDecay(base):
        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(0.99)
            return output

    return WithWeightDecay


def with_record(base: type) -> type:
    """Returns a strategy that records in ``teardown`` what its model is, before and after."""

    class WithRecord(base):
        def teardown(self) -> None:
            before = type(self.model)
            super().teardown()
            self.record = [
                *getattr(self, "record", []),
                (issubclass(before, DistributedDataParallel), type(self.model).__name__),
            ]

    return WithRecord


def train(make: Any, arguments: dict[str, Any]) -> list[Any]:
    results = []
    for base in BASES:
        torch.manual_seed(3)
        strategy = make(base)(**arguments)
        trainer, model = make_trainer(strategy, max_epochs=2), MLP()
        trainer.fit(model, loader())
        validated = trainer.validate(model, loader(), verbose=False)
        results.append((state_of(model), validated, getattr(strategy, "record", None)))
    return results


@pytest.mark.processes
@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (with_own_hook, {}),
        (with_weight_decay, {}),
        (with_weight_decay, {"find_unused_parameters": True}),
        (with_record, {}),
    ],
    ids=["configure_ddp", "optimizer_step", "optimizer_step with unused parameters", "teardown"],
)
def test_overrides_work_as_with_stock(make: Any, arguments: dict[str, Any]) -> None:
    for stock, ours in run_ranks(train, make, arguments):
        assert_same_bits(ours[0], stock[0])
        assert ours[1:] == stock[1:]

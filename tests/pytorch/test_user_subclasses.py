"""Subclasses of ``DDPStrategy`` that override Lightning's methods work as subclasses of Lightning's class."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
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
    """Returns a strategy that records the class of its model before and after ``teardown``."""

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
    for stock, ext in run_ranks(train, make, arguments):
        assert_same_bits(ext[0], stock[0])
        assert ext[1:] == stock[1:]


class Unfreezes(MLP):
    """A model that trains its first layer from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


def count_hook_calls() -> list[int]:
    sizes: list[int] = []

    def counting(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sizes.append(bucket.buffer().numel())
        return fp16_compress_hook(state, bucket)

    class Counts(DDPStrategy):
        def configure_ddp(self) -> None:
            super().configure_ddp()
            self.model.register_comm_hook(None, counting)

    torch.manual_seed(3)
    make_trainer(Counts(), max_epochs=2, limit_train_batches=2).fit(Unfreezes(), loader())
    return sizes


@pytest.mark.processes
def test_a_users_hook_remains_when_a_layer_is_unfrozen() -> None:
    first, last = (sum(each.numel() for each in layer.parameters()) for layer in (MLP().net[0], MLP().net[-1]))
    for sizes in run_ranks(count_hook_calls):
        assert sum(sizes) == 2 * last + 2 * (first + last)

"""A user's strategy based on Lightning's ``ParallelStrategy`` has equal results with this package's base class."""

import os
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy as LightningParallelStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext import DDPStrategy, ParallelStrategy
from tests.support.models import assert_same_bits, fit, loader, state_of
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


class Ranks:
    """The parts of a strategy for both base classes: the device and the rank of this process, and equal gradients."""

    is_distributed = True
    root_device = CPU

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def set_world_ranks(self) -> None:
        self.cluster_environment.set_global_rank(self.local_rank)
        self.cluster_environment.set_world_size(len(self.parallel_devices))

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        for parameter in self.lightning_module.parameters():
            parameter.grad = self.reduce(parameter.grad)


class OverAStore(Ranks):
    """A strategy whose collectives use a store, without a process group."""

    store: Any = None
    num_exchanges = 0

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.store is None:
            port = int(os.environ["MASTER_PORT"])
            self.store = dist.TCPStore("127.0.0.1", port, self.world_size, self.is_global_zero)

    def exchange(self, value: Any) -> list[Any]:
        self.num_exchanges += 1
        self.store.set(f"{self.num_exchanges}/{self.global_rank}", pickle.dumps(value))
        return [pickle.loads(self.store.get(f"{self.num_exchanges}/{rank}")) for rank in range(self.world_size)]

    def leave(self) -> None:
        """Keeps rank 0, which serves the store, until all ranks have left."""
        self.store.set(f"{self.global_rank} has left", "")
        if self.is_global_zero:
            self.store.wait([f"{rank} has left" for rank in range(self.world_size)])

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        total = torch.stack(self.exchange(tensor.detach())).sum(dim=0)
        return total if "sum" in str(reduce_op).lower() else total / self.world_size

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return torch.stack(self.exchange(tensor))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.exchange(obj)[src]

    def barrier(self, name: str | None = None) -> None:
        self.exchange(name)


class WithoutCollectives(Ranks):
    """A strategy that joins a process group and inherits collectives, which Lightning's base class does not have."""

    def setup_environment(self) -> None:
        super().setup_environment()
        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=self.global_rank, world_size=self.world_size)


class WrapsInDDP(WithoutCollectives):
    """A strategy that exchanges gradients with torch's DDP, and counts the exchanges."""

    num_exchanges = 0

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self.model = DistributedDataParallel(self.model)
        self.model.register_comm_hook(None, self.exchange)

    def exchange(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.num_exchanges += 1
        return allreduce_hook(state, bucket)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Does nothing: DDP has exchanged the gradients."""

    reduce = broadcast = lambda self, value, *args, **kwargs: value  # abstract in Lightning's base class
    barrier = lambda self, *args, **kwargs: None  # noqa: E731


def use(strategy: Any, **trainer_kwargs: Any) -> dict[str, Any]:
    """Trains, validates, and reduces a decision that differs between ranks."""
    trainer, model = fit(strategy, **trainer_kwargs)
    validated = trainer.validate(model, loader(), verbose=False)
    return {
        "type": type(strategy),
        "rank": strategy.global_rank,
        "weights": state_of(model),
        "validated": validated,
        "gathered": strategy.all_gather(torch.tensor([strategy.global_rank])).flatten().tolist(),
        "sent": strategy.broadcast({"from": strategy.global_rank}, src=1),
        "all, any": [strategy.reduce_boolean_decision(strategy.is_global_zero, all=all) for all in (True, False)],
    }


def use_written_for(base: type, part: type) -> dict[str, Any]:
    strategy = type("Written", (part, base), {})()
    outcome = use(strategy)
    if isinstance(strategy, OverAStore):
        strategy.leave()
    assert issubclass(outcome.pop("type"), base)
    return outcome


class CountsReductions(DDPStrategy):
    num_reductions = 0

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        self.num_reductions += 1
        return super().reduce(tensor, group, reduce_op)


def use_ddp(kind: type[DDPStrategy] = DDPStrategy) -> dict[str, Any]:
    strategy = kind(process_group_backend="gloo")
    outcome = use(strategy)
    if kind is CountsReductions:
        before = strategy.num_reductions
        strategy.reduce_boolean_decision(True)
        assert strategy.num_reductions == before + 1
    outcome.pop("type")
    return outcome


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one.pop("weights"), other.pop("weights"))
        assert one == other
        assert one["gathered"] == [0, 1]
        assert one["sent"] == {"from": 1}
        assert one["all, any"] == [False, True]
    assert [one["rank"] for one in found] == [0, 1]


@pytest.mark.processes
def test_a_strategy_with_collectives_of_its_own_trains_as_on_lightnings_base():
    found = run_ranks(use_written_for, ParallelStrategy, OverAStore)
    assert_same(found, run_ranks(use_written_for, LightningParallelStrategy, OverAStore))


@pytest.mark.processes
def test_a_strategy_without_collectives_has_those_of_its_process_group():
    assert_same(run_ranks(use_written_for, ParallelStrategy, WithoutCollectives), run_ranks(use_ddp))


@pytest.mark.processes
def test_an_overridden_reduce_of_ddp_also_reduces_decisions():
    assert_same(run_ranks(use_ddp, CountsReductions), run_ranks(use_ddp))


def count_exchanges(base: type) -> int:
    strategy = type("Written", (WrapsInDDP, base), {})()
    fit(strategy, accumulate_grad_batches=4)
    return strategy.num_exchanges


@pytest.mark.processes
def test_a_strategy_that_wraps_its_model_in_ddp_exchanges_once_per_window():
    for base in (ParallelStrategy, LightningParallelStrategy):
        assert run_ranks(count_exchanges, base) == [4, 4]  # two epochs of eight batches per rank


class Alone(Ranks, ParallelStrategy):
    """A strategy without a process group, which is sent to a worker."""


def test_without_a_process_group_each_collective_returns_its_input():
    strategy = Alone()
    tensor = torch.tensor([1.0, 2.0])
    for _ in range(2):
        for collective in (strategy.reduce, partial(strategy.reduce, reduce_op="sum"), strategy.all_gather):
            assert collective(tensor) is tensor
        assert strategy.broadcast("text") == "text"
        assert strategy.reduce_boolean_decision(True)
        assert not strategy.reduce_boolean_decision(False, all=False)
        strategy.barrier("here")
        strategy = pickle.loads(pickle.dumps(strategy))

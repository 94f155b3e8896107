"""Gradients that are exchanged without DDP's reducer: all that a script can see is what it sees with the reducer."""

import copy
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

from lightning_strategies_ext.torch_distributed.direct_exchange import LARGE_NUM_BYTES, DistributedModel
from lightning_strategies_ext.torch_distributed.wrapping import wrap_in_ddp
from tests.support.ranks import run_ranks

WIDTH = 160  # of layers whose weights are large
CPU = torch.device("cpu")


class Net(nn.Module):
    """Two large weights of equal shape, small ones, one that is large and not contiguous, and one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.convolution = nn.Conv2d(16, 120, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.offset = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, rows: Tensor, *, backwards: bool = False) -> Tensor:
        layers = [self.first, self.second]
        for layer in layers[::-1] if backwards else layers:
            rows = rows + layer(rows).relu()
        return self.rest(rows)

    def rest(self, rows: Tensor) -> Tensor:
        images = rows[:, :16].reshape(-1, 16, 1, 1).expand(-1, 16, 4, 4).contiguous(memory_format=torch.channels_last)
        images = self.convolution(images)
        return self.last(self.norm(rows)).mean() + images.pow(2).mean() + self.offset.pow(2).sum().float()


class Checkpointed(Net):
    """Computes a layer again in the backward pass, or the same layer twice."""

    def __init__(self, *, reentrant: bool, twice: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.twice = twice

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.requires_grad_()
        for layer in [self.second, *[self.first] * (1 + self.twice)]:
            rows = checkpoint(layer, rows, use_reentrant=self.reentrant).relu()
        return self.rest(rows)


class Undefined(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, *unused: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient, None, None


class WithUndefined(Net):
    """Rank 1 computes no gradients of a large and a small parameter that it uses."""

    def forward(self, rows: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            rows = Undefined.apply(rows, self.first.weight, self.first.bias)  # type: ignore[no-untyped-call]
            return self.last(self.norm(self.second(rows))).mean() + self._rest(rows)
        return self.last(self.norm(self.second(self.first(rows)))).mean() + self._rest(rows)

    def _rest(self, rows: Tensor) -> Tensor:
        return self.convolution(rows[:, :16].reshape(-1, 16, 1, 1)).mean() + self.offset.sum().float()


class WithSharedMemory(Net):
    """Autograd lets the gradients of two parameters refer to the memory of a gradient that it still needs."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(128 * WIDTH))
        self.small = nn.Parameter(torch.zeros(8 * WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        many = self.first(rows.repeat(16, 1)) + self.large.view(128, WIDTH)
        few = self.second(many[:8]) + self.small.view(8, WIDTH)
        return super().forward(few) + many.pow(2).mean()


class WithUnused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


def batch(number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(8, WIDTH, generator=generator)


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


# --- what is tried, each with the reducer and without ---


def one_pass(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Net())
    seen = []
    for number in range(3):
        model(batch(number)).backward()
        seen += gradients(model)
        model.zero_grad(set_to_none=number == 1)
    return seen


def accumulating(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Net())
    with model.no_sync():
        model(batch(0)).backward()
        local = gradients(model)
    model(batch(1)).backward()
    return local + gradients(model)


def forward_passes_before_one_backward_pass(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Net())
    (model(batch(0)) + model(batch(1))).backward()
    return gradients(model)


def forward_passes_without_backward_pass(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Net())
    model(batch(0))
    with torch.no_grad():
        model(batch(1))
    model(batch(2)).backward()
    return gradients(model)


def a_second_backward_pass(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Net())
    loss = model(batch(0))
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


def a_gradient_of_the_input_first(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Net())
    rows = batch(0).requires_grad_()
    loss = model(rows)
    (of_input,) = torch.autograd.grad(loss, rows, retain_graph=True)
    loss.backward()
    return [of_input, *gradients(model)]


def with_a_graph_of_the_gradients(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Net())
    model(batch(0)).backward(create_graph=model.is_exchanged_directly)  # which the reducer does not support
    return [each.detach() for each in gradients(model)]


def checkpoints(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Checkpointed(reentrant=False))
    model(batch(0)).backward()
    return gradients(model)


def reentrant_checkpoints(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Checkpointed(reentrant=True))
    model(batch(0)).backward()
    return gradients(model)


def a_layer_in_two_reentrant_checkpoints(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Checkpointed(reentrant=True, twice=True))
    with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once") as raised:
        model(batch(0)).backward()
    return type(raised.value).__name__


def a_parameter_without_gradient(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(WithUnused())
    model(batch(0)).backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration") as raised:
        model(batch(1))
    with torch.no_grad():
        model(batch(1))  # which exchanges nothing
    return type(raised.value).__name__


def an_undefined_gradient(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(WithUndefined())
    model(batch(0)).backward()
    return gradients(model)


def gradients_in_shared_memory(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(WithSharedMemory())
    seen: list[Tensor] = []
    model.module.small.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad))
    model(batch(0)).backward()
    found = [each.clone() for each in seen] + gradients(model)
    model.zero_grad()
    model(batch(1)).backward()  # in which large gradients are exchanged as soon as they are computed
    return [*found, *gradients(model)]


def one_small_parameter(wrap: Callable[..., DistributedModel]) -> Any:
    module, seen = nn.Linear(WIDTH, 1, bias=False), []
    module.weight.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad))
    model = wrap(module)
    model(batch(0)).sum().backward()
    return [*seen, *gradients(model)]


def ignored_parameters(wrap: Callable[..., DistributedModel]) -> Any:
    module = WithUnused()
    module._ddp_params_and_buffers_to_ignore = ["spare.weight", "spare.bias", "first.weight"]  # type: ignore[assignment]
    model = wrap(module)
    model(batch(0)).backward()
    return gradients(model)


def hooks_of_the_users(wrap: Callable[..., DistributedModel]) -> Any:
    module, seen = Net(), []
    module.first.weight.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.clone()))
    model = wrap(module)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.clone()))
    model(batch(0)).backward()
    return [each.sum() for each in seen] + gradients(model)


def a_communication_hook_after_all(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Net())
    model(batch(0)).backward()
    model.zero_grad()
    calls = []

    def twice(state: Any, bucket: dist.GradBucket) -> Any:
        calls.append(bucket.index())
        return allreduce_hook(None, bucket).then(lambda future: 2 * future.value())

    twice.__annotations__.clear()
    model.register_comm_hook(None, twice)
    model(batch(1)).backward()
    assert calls
    assert not model.is_exchanged_directly
    return gradients(model)


def buffers(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Net())
    seen = []
    for number in range(4):
        with model.no_sync() if number == 1 else torch.enable_grad():
            model(batch(number))
        seen.append(model.module.norm.running_mean.clone())
    with torch.no_grad():
        model(batch(9))
    model(batch(10))
    return [*seen, model.module.norm.running_mean.clone()]


def different_numbers_of_batches(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(nn.Linear(WIDTH, 1))
    with model.join():
        for number in range(2 + dist.get_rank()):
            model.zero_grad()
            model(batch(number)).sum().backward()
    return gradients(model)


def frozen_weights(wrap: Callable[..., DistributedModel]) -> Any:
    module = Net()
    module.first.requires_grad_(False)
    model = wrap(module)
    model(batch(0)).backward()
    return gradients(model)


def copies(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Net())
    model(batch(0)).backward()
    return copy.deepcopy(model.module)(batch(1)).detach()


CASES = [
    one_pass,
    accumulating,
    forward_passes_before_one_backward_pass,
    forward_passes_without_backward_pass,
    a_second_backward_pass,
    a_gradient_of_the_input_first,
    with_a_graph_of_the_gradients,
    checkpoints,
    reentrant_checkpoints,
    a_layer_in_two_reentrant_checkpoints,
    a_parameter_without_gradient,
    an_undefined_gradient,
    gradients_in_shared_memory,
    one_small_parameter,
    ignored_parameters,
    hooks_of_the_users,
    a_communication_hook_after_all,
    buffers,
    different_numbers_of_batches,
    frozen_weights,
    copies,
]


@contextmanager
def process_group() -> Iterator[None]:
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("shm", rank=rank, world_size=world_size)
    yield
    dist.destroy_process_group()


def try_all(names: list[str]) -> list[tuple[Any, Any]]:
    found = []
    with process_group():
        for case in CASES:
            if case.__name__ not in names:
                continue
            outcomes = []
            for is_direct in (False, True):

                def wrap(module: nn.Module, is_direct: bool = is_direct) -> DistributedModel:
                    model = wrap_in_ddp(module, CPU)
                    if is_direct:
                        model.exchange_directly({})
                    assert model.is_exchanged_directly is is_direct
                    return model

                torch.manual_seed(1)
                try:
                    outcomes.append(case(wrap))
                except BaseException:
                    outcomes.append(traceback.format_exc())
            found.append((outcomes[0], outcomes[1]))
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[tuple[Any, Any]]]:
    names = [case.__name__ for case in CASES]
    of_ranks = run_ranks(try_all, names)
    return {name: [found[place] for found in of_ranks] for place, name in enumerate(names)}


@pytest.mark.processes
@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_two_ranks_have_what_the_reducer_gives_them_to_the_last_bit(
    name: str, outcomes: dict[str, list[tuple[Any, Any]]]
) -> None:
    for with_reducer, without in outcomes[name]:
        assert "Traceback" not in f"{with_reducer}{without}", f"{with_reducer}\n{without}"
        if isinstance(with_reducer, list):
            assert len(with_reducer) == len(without) > 0
            for ours, theirs in zip(without, with_reducer, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        else:
            assert str(with_reducer) == str(without)


# --- more ranks, and ranks that differ ---


def in_different_orders() -> tuple[list[Tensor], list[Tensor]]:
    with process_group():
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        module = Net()
        # The mean of what the ranks compute each by itself, in its order.
        expected: list[Tensor] = []
        for number in range(2):
            module.zero_grad()
            module(batch(number), backwards=rank == 1).backward()
            for each in gradients(module):
                dist.all_reduce(each)
                expected.append(each / size)
        torch.manual_seed(1)
        model = wrap_in_ddp(Net(), CPU, broadcast_buffers=False)
        model.exchange_directly({})
        found = []
        for number in range(2):
            model.zero_grad()
            model(batch(number), backwards=rank == 1).backward()
            found += gradients(model)
    return expected, found


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_compute_layers_of_equal_shape_in_different_orders(world_size: int) -> None:
    assert 4 * WIDTH * WIDTH >= LARGE_NUM_BYTES
    for expected, found in run_ranks(in_different_orders, world_size=world_size):
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right)


# --- when the reducer exchanges ---


def reasons() -> list[str]:
    logger = logging.getLogger("lightning_strategies_ext.torch_distributed.direct_exchange")
    logger.setLevel(logging.INFO)
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger.addHandler(Collect())
    compiled = Net()
    compiled.compile()
    with process_group():
        for module, ddp_kwargs in (
            (Net(), {"find_unused_parameters": True}),
            (Net(), {"static_graph": True}),
            (Net(), {"bucket_cap_mb": 1.0}),
            (Net().to(torch.bfloat16), {}),
            (nn.Sequential(nn.Embedding(4, 4, sparse=True)), {}),
            (compiled, {}),
        ):
            model = wrap_in_ddp(module, CPU, **ddp_kwargs)
            model.exchange_directly(ddp_kwargs)
            assert not model.is_exchanged_directly
        model = wrap_in_ddp(Net(), CPU)
        model.exchange_directly({}, tries_buckets=True)
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        model = wrap_in_ddp(Net(), CPU, process_group=alone)
        model.exchange_directly({"process_group": alone})
    return found


@pytest.mark.processes
def test_a_message_says_why_the_reducer_exchanges() -> None:
    found = run_ranks(reasons)[0]
    said = [
        "it finds out which parameters are used",
        "it finds out which parameters are used",
        "`bucket_cap_mb=1.0`",
        "a parameter is neither float32 nor float64",
        "gradients may be sparse",
        "a module is compiled",
        "sizes of buckets are compared",
        "there is one rank",
    ]
    assert found == [f"DDP's reducer exchanges the gradients: {each}." for each in said]

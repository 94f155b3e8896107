"""Modules and passes for :mod:`tests.torch_distributed.test_direct_exchange`.

Each case trains a module that ``wrap`` wraps in DDP, and returns all values that a script can observe::

    gradients_with_reducer = one_pass(lambda module: wrap_in_ddp(module, torch.device("cpu")))
"""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

from lightning_strategies_ext.torch_distributed.distributed_model import DistributedModel

WIDTH = 160  # number of features of layers with large weights


class Net(nn.Module):
    """A net with two large weights of equal shape, small weights, a large non-contiguous weight, and another dtype."""

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
    """A net that recomputes a layer in the backward pass, once or twice."""

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
    """A net in which rank 1 computes no gradients of a large and a small parameter that it uses."""

    def forward(self, rows: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            rows = Undefined.apply(rows, self.first.weight, self.first.bias)  # type: ignore[no-untyped-call]
            return self.last(self.norm(self.second(rows))).mean() + self._rest(rows)
        return self.last(self.norm(self.second(self.first(rows)))).mean() + self._rest(rows)

    def _rest(self, rows: Tensor) -> Tensor:
        return self.convolution(rows[:, :16].reshape(-1, 16, 1, 1)).mean() + self.offset.sum().float()


class WithSharedMemory(Net):
    """A net in which the gradients of two parameters share memory with a gradient that autograd still needs."""

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


# --- cases, which run with and without the reducer ---


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


def accumulating_means(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Net())
    seen = []
    for number in range(3):
        model(batch(number)).backward()
        seen += gradients(model)
    return seen


def a_rank_that_is_late(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Net())
    seen = []
    for number in range(4):
        rows = model.module.first(batch(number))
        if number % 2 == dist.get_rank():
            rows.register_hook(lambda _: time.sleep(0.02))  # other ranks wait longer than they spin
        model(rows).backward()
        seen += gradients(model)
        model.zero_grad()
    return seen


def gradients_that_the_script_stores(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(Net(), gradient_as_bucket_view=False)
    stored: list[Any] = []
    for number in range(3):
        model(batch(number)).backward()
        stored += [each.grad for each in model.parameters()]
        model.zero_grad()
    return stored


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
    model(batch(0)).backward(create_graph=model.is_exchanged_directly)  # the reducer does not support this
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
        model(batch(1))  # no exchange
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
    model(batch(1)).backward()  # this pass exchanges large gradients as soon as they are computed
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


class WithBuffers(nn.Module):
    """A module with buffers of several dtypes and layouts, whose values differ between ranks."""

    VALUES = (
        torch.tensor([-0.0, 0.0, float("nan"), float("-inf"), 1e-45]),
        torch.tensor([True, False, True]),
        torch.tensor(-(2**63)),
        torch.tensor([[1, -2], [-128, 127], [0, 5]], dtype=torch.int8).t(),
        torch.tensor([1.5, -3e38], dtype=torch.bfloat16),
        torch.tensor([-0.0, 1e-320], dtype=torch.float64),
        torch.tensor([complex(1, -0.0)]),
        torch.empty(0),
    )

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        for number, value in enumerate(self.VALUES):
            self.register_buffer(f"buffer{number}", value.clone())

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows).sum()


def buffers_of_many_kinds(wrap: Callable[..., DistributedModel]) -> Any:
    model = wrap(WithBuffers())
    seen = []
    for number in range(3):
        if dist.get_rank() == 1:
            for buffer in model.module.buffers():
                buffer.fill_(1)
        if number == 1:  # a different tensor with a different size
            model.module.buffer0 = torch.full((7,), dist.get_rank() + 2.5)
        model(batch(number)).backward()
        seen += [each.contiguous().view(-1).view(torch.uint8).clone() for each in model.module.buffers()]
    return seen


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
    accumulating_means,
    a_rank_that_is_late,
    gradients_that_the_script_stores,
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
    buffers_of_many_kinds,
    different_numbers_of_batches,
    frozen_weights,
    copies,
]

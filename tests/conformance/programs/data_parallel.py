"""DistributedDataParallel with each option and with uneven inputs; pipelines; a user's ``Joinable``."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from tests.conformance.programs import needed, program


class Model(nn.Module):
    """A net with a buffer, and with a layer that a step can skip."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32)
        self.conditional = nn.Linear(32, 32)
        self.end = nn.Linear(32, 4)

    def forward(self, batch: Tensor, is_whole: bool = True) -> Tensor:
        batch = self.norm(self.begin(batch))
        return self.end(self.conditional(batch) if is_whole else batch)


@program()
def plain() -> Any:
    return _trained()


@program()
def small_buckets() -> Any:
    return _trained(bucket_cap_mb=0.001)


@program()
def gradients_as_views_of_buckets() -> Any:
    return _trained(gradient_as_bucket_view=True, bucket_cap_mb=0.002)


@program()
def static_graph() -> Any:
    return _trained(static_graph=True)


@program()
def buffers_of_their_own() -> Any:
    return _trained(broadcast_buffers=False)


@program()
def parameters_that_are_not_used() -> Any:
    model = _wrapped(find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        (model(torch.randn(4, 8), (step + dist.get_rank()) % 2 == 0) ** 2).mean().backward()
        optimizer.step()
    return model.state_dict()


@program()
def no_sync() -> Any:
    model = _wrapped()
    with model.no_sync():
        (model(torch.randn(4, 8)) ** 2).mean().backward()
    (model(torch.randn(4, 8)) ** 2).mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@program()
def hooks() -> Any:
    results = {}
    for name, hook in {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "gathers": _hook_that_gathers,
        "chains": _hook_that_chains,
    }.items():
        results[name] = _trained_with_hook(dist.group.WORLD, hook)
    return results


@program()
def power_sgd() -> Any:
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return _trained_with_hook(state, powerSGD_hook.powerSGD_hook)


@program()
def post_local_sgd() -> Any:
    state = post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, dist.group.WORLD, start_localSGD_iter=1)
    return _trained_with_hook(state, post_localSGD_hook.post_localSGD_hook)


@program()
def joins_with_uneven_inputs() -> Any:
    model = _wrapped(find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for _ in range(3 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            (model(torch.randn(4, 8)) ** 2).mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@program()
def joins_with_gradients_divided_by_contributing_ranks() -> Any:
    model = _wrapped()
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 + 2 * dist.get_rank()):
            (model(torch.randn(4, 8)) ** 2).mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@program()
def join_names_the_rank_that_ended_first() -> Any:
    model = _wrapped()
    try:
        with model.join(throw_on_early_termination=True):
            for _ in range(2 + dist.get_rank()):
                (model(torch.randn(4, 8)) ** 2).mean().backward()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "no error"


@program()
def joinable_of_ones_own() -> Any:
    counter = _Counter()
    with Join([counter]):
        for _ in range(2 + 3 * dist.get_rank()):
            counter.count()
    return [counter.total, counter.max_count]


@program()
def compiled() -> Any:
    model = _wrapped()
    return _losses(torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters(), lr=0.1))


@program()
def pipeline() -> Any:
    stage_of, schedule_of = (
        needed(f"torch.distributed.pipelining:{name}") for name in ("PipelineStage", "Schedule1F1B")
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    part = whole[rank]
    schedule = schedule_of(stage_of(part, rank, size, torch.device("cpu")), 4, loss_fn=nn.functional.mse_loss)
    losses: list[Tensor] = []
    for _ in range(2):
        if rank == 0:
            schedule.step(torch.randn(8, 8))
        else:
            schedule.step(target=torch.ones(8, 4), losses=losses)
    return [losses, [parameter.grad for parameter in part.parameters()]]


class _Counter(Joinable):
    """A joinable that sums the counts of the ranks that have not joined."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(1)
        self.max_count = torch.zeros(1)

    def count(self) -> None:
        Join.notify_join_context(self)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        self.total += ones

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _CountingHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class _CountingHook(JoinHook):
    def __init__(self, counter: _Counter) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        dist.all_reduce(torch.zeros(1))

    def post_hook(self, is_last_joiner: bool) -> None:
        most = self.counter.total.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        self.counter.max_count = most


def _hook_that_gathers(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    outputs = [torch.empty_like(bucket.buffer()) for _ in range(2)]
    work = dist.all_gather(outputs, bucket.buffer(), async_op=True)
    return work.get_future().then(lambda _: (outputs[0] + outputs[1]) / 2)


def _hook_that_chains(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    halved = work.get_future().then(lambda future: future.value()[0] / 2)
    return halved.then(lambda future: future.value() * 1)


def _trained_with_hook(state: Any, hook: Callable[..., Any]) -> Any:
    model = _wrapped()
    model.register_comm_hook(state, hook)
    return _losses(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _trained(**options: Any) -> Any:
    model = _wrapped(**options)
    losses = _losses(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return [losses, dict(model.state_dict())]


def _wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(3 + dist.get_rank())  # the parameters of rank 0 count
    model = DistributedDataParallel(Model(), **options)
    torch.manual_seed(20 + dist.get_rank())
    return model


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(torch.randn(4, 8)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *[parameter.detach().clone() for parameter in model.parameters()]]

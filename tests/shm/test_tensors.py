"""The ``shm`` process group with unusual tensors, values of futures, and calls that differ between ranks."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ReduceOp
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.shm.start import start_shm
from tests.support.ranks import outcomes_of_ranks, run_ranks

pytestmark = pytest.mark.processes


def groups() -> tuple[int, Any, Any]:
    """Returns this rank, and the groups of all ranks over shm and over gloo."""
    rank = start_shm()
    return rank, dist.group.WORLD, dist.new_group(backend="gloo")


def first_line(function: Any, *args: Any) -> str:
    """Returns the kind of error that a call raises; an empty text if it raises none."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__
    return ""


def call_with_dtensors() -> tuple[list[str], list[str], float]:
    rank, shm, gloo = groups()
    tensor = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0, 1]), [Replicate()])
    errors = []
    for group in (shm, gloo):
        calls = [
            lambda group=group: dist.all_reduce(tensor, group=group),
            lambda group=group: dist.broadcast(tensor, 0, group=group),
            lambda group=group: dist.all_gather([tensor, tensor], tensor, group=group),
        ]
        errors.append([first_line(call) for call in calls])
    plain = torch.full((3,), rank + 1.0)
    dist.all_reduce(plain)
    return errors[0], errors[1], plain[0].item()


def test_dtensors_are_refused_as_by_gloo_and_the_group_continues():
    for over_shm, over_gloo, total in run_ranks(call_with_dtensors):
        assert over_shm == over_gloo
        assert all(over_shm)
        assert total == 3.0


def call_with_tensors_that_trace() -> tuple[list[str], list[str], float]:
    rank, shm, gloo = groups()
    errors: list[list[str]] = []
    for group in (shm, gloo):
        with FakeTensorMode():
            tensor, parts = torch.ones(4), [torch.empty(4), torch.empty(4)]
            whole, part = torch.empty(8), torch.empty(2)
            calls = [
                lambda: dist.all_reduce(tensor, group=group),  # noqa: B023
                lambda: dist.broadcast(tensor, 0, group=group),  # noqa: B023
                lambda: dist.reduce(tensor, 0, group=group),  # noqa: B023
                lambda: dist.all_gather(parts, tensor, group=group),  # noqa: B023
                lambda: dist.all_gather_into_tensor(whole, tensor, group=group),  # noqa: B023
                lambda: dist.reduce_scatter_tensor(part, tensor, group=group),  # noqa: B023
            ]
            if rank == 0:  # tracing executes nothing, so other ranks need not take part
                calls.append(lambda: dist.barrier(group=group))  # noqa: B023
            errors.append([first_line(call) for call in calls])
    plain = torch.full((3,), rank + 1.0)
    dist.all_reduce(plain)
    return errors[0], errors[1], plain[0].item()


def test_tensors_that_trace_are_traced_as_with_gloo():
    outcomes = run_ranks(call_with_tensors_that_trace)
    for over_shm, over_gloo, total in outcomes:
        assert over_shm == over_gloo
        assert total == 3.0
    if set(outcomes[0][1]) != {""}:
        pytest.skip(f"torch {torch.__version__} traces no collectives, also over gloo: {outcomes[0][1]}")


class OwnTensor(Tensor):
    """A tensor subclass with memory, like those of users."""


def call_with_kinds_of_tensors() -> list[Any]:
    rank = start_shm()
    results = []
    for make in (
        lambda: nn.Parameter(torch.full((4,), rank + 1.0)),
        lambda: torch.full((4,), rank + 1.0).as_subclass(OwnTensor),
        lambda: torch.full((1,), rank + 1.0).expand(4),
        lambda: torch.full((2, 1), rank + 1.0).expand(2, 3),
        lambda: torch.full((2, 2, 3), rank + 1.0).transpose(0, 2),
    ):
        tensor = make()
        dist.all_reduce(tensor)
        other = make()
        dist.broadcast(other, 1)
        gathered = [torch.empty(other.shape), torch.empty(other.shape)]
        dist.all_gather(gathered, make())
        results.append([tensor.unique().tolist(), other.unique().tolist(), [g.unique().tolist() for g in gathered]])
    return results


def test_parameters_subclasses_and_expanded_tensors_are_moved():
    assert run_ranks(call_with_kinds_of_tensors) == [[[[3.0], [2.0], [[1.0], [2.0]]]] * 5] * 2


def call_wrongly_on_one_rank() -> tuple[list[str], float]:
    rank = start_shm()
    errors = []
    if rank == 0:
        float8 = torch.ones(4).to(torch.float8_e4m3fn)
        calls = [
            lambda: dist.all_reduce(float8),
            lambda: dist.all_reduce(torch.ones(4, dtype=torch.bool), ReduceOp.AVG),
            lambda: dist.all_reduce(torch.ones(4), ReduceOp.BAND),
            lambda: dist.reduce_scatter_tensor(float8[:2].clone(), float8),
            lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)),
            lambda: dist.group.WORLD.allreduce(torch.ones(3), dist.AllreduceOptions()),  # a tensor instead of a list
            lambda: dist.group.WORLD.allreduce([torch.ones(3)] * 2, dist.AllreduceOptions()),
            lambda: dist.group.WORLD.broadcast([torch.ones(3)] * 2, dist.BroadcastOptions()),
            lambda: dist.group.WORLD.reduce([torch.ones(3)] * 2, dist.ReduceOptions()),
            lambda: torch.vmap(lambda row: dist.all_reduce(row) or row)(torch.ones(2, 3)),
        ]
        errors = [first_line(call) for call in calls]
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    return errors, tensor[0].item()


def test_a_wrong_call_of_one_rank_is_an_error_on_that_rank_only():
    (errors, total), (_, other) = run_ranks(call_wrongly_on_one_rank)
    assert all(errors), errors
    assert (total, other) == (3.0, 3.0)


def values_of_futures() -> tuple[list[Any], list[Any]]:
    rank, shm, gloo = groups()
    values: list[list[Any]] = [[], []]
    for group, seen in zip((shm, gloo), values, strict=True):
        tensor = torch.full((2,), rank + 1.0)
        pair = [torch.zeros(2), torch.zeros(2)]
        parts = [torch.ones(2), torch.ones(2)]
        works = [
            dist.broadcast(tensor.clone(), 0, group=group, async_op=True),
            dist.broadcast(tensor.clone(), 1, group=group, async_op=True),
            dist.all_reduce(tensor.clone(), group=group, async_op=True),
            dist.all_reduce(tensor.repeat(2).view(2, 2).t(), group=group, async_op=True),
            dist.all_gather(pair, tensor, group=group, async_op=True),
            dist.scatter(tensor.clone(), parts if rank == 0 else None, src=0, group=group, async_op=True),
            dist.reduce(tensor.clone(), 0, group=group, async_op=True),
        ]
        for work in works:
            work.wait()
            value = work.get_future().value()
            seen.append([part.tolist() for part in value])
        if rank == 1:  # the result of a reduction to one rank is undefined on other ranks
            seen[-1] = [len(part) for part in seen[-1]]
    return values[0], values[1]


def test_futures_return_the_results_of_gloo():
    for over_shm, over_gloo in run_ranks(values_of_futures):
        assert over_shm == over_gloo


def take_the_first_of_each() -> list[float]:
    rank = start_shm()
    tensor = torch.full((2,), rank + 1.0)
    works = [
        dist.broadcast(tensor.clone(), 0, async_op=True),
        dist.reduce(tensor.clone(), 0, async_op=True),
        dist.all_reduce(tensor.clone(), async_op=True),
    ]
    return [work.get_future().then(lambda future: future.value()[0][0].item()).wait() for work in works]


def test_a_callback_can_take_the_tensor_on_every_rank():
    first, second = run_ranks(take_the_first_of_each)
    assert first == [1.0, 3.0, 3.0]
    assert (second[0], second[2]) == (1.0, 3.0)


def disagree(on: str) -> None:
    rank = start_shm(timeout_s=20)
    tensor = torch.full((4,), rank + 1.0)
    if on == "reduction":
        dist.all_reduce(tensor.bfloat16(), ReduceOp.MAX if rank else ReduceOp.SUM)
    elif on == "reduction of one way and of the other":
        dist.all_reduce(tensor, ReduceOp.MAX if rank else ReduceOp.SUM)
    elif on == "root of a broadcast":
        dist.broadcast(tensor, rank)
    elif on == "root of a reduce":
        dist.reduce(tensor, rank)
    elif on == "reduction to a scatter":
        dist.reduce_scatter_tensor(tensor[:2].clone(), tensor, ReduceOp.MIN if rank else ReduceOp.AVG)
    elif on == "sizes of several tensors":
        several = tensor.bfloat16().repeat(2).split([5, 3] if rank else [3, 5])
        dist.group.WORLD.allreduce_coalesced(list(several), dist.AllreduceCoalescedOptions()).wait()
    elif on == "dtypes of several tensors":
        several = [tensor.bfloat16(), tensor.to(torch.float16 if rank else torch.int16)]
        dist.group.WORLD.allreduce_coalesced(several, dist.AllreduceCoalescedOptions()).wait()


@pytest.mark.parametrize(
    ("on", "expected_texts"),
    [
        ("reduction", ["(MAX)", "(SUM)"]),
        ("reduction of one way and of the other", []),
        ("root of a broadcast", ["broadcast of torch.float32 with root 0", "broadcast of torch.float32 with root 1"]),
        ("root of a reduce", ["root 0", "root 1"]),
        ("reduction to a scatter", ["(MIN)", "(AVG)"]),
        ("sizes of several tensors", ["32 bytes on all ranks together (checksum", "tensors of the same shape"]),
        ("dtypes of several tensors", ["32 bytes on all ranks together (checksum", "tensors of the same shape"]),
    ],
)
def test_ranks_that_disagree_get_an_error_that_names_the_difference(on: str, expected_texts: list[str]):
    for outcome in outcomes_of_ranks(disagree, on):
        assert outcome.error is not None, outcome
        assert "do not call the same collectives" in outcome.error
        assert all(text in outcome.error for text in expected_texts), outcome


def call_in_short() -> list[list[float]]:
    rank, *both = groups()
    results = []
    # Only newer versions of torch have the short forms with a timeout, and the short form of scatter.
    timeout = {"timeout": timedelta(seconds=20)} if "timeout" in (dist.ProcessGroup.broadcast.__doc__ or "") else {}
    for group in both:
        whole, part = torch.arange(4.0) + rank, torch.zeros(2)
        several, gathered, pair = [whole.clone() for _ in range(12)], [part.clone(), part.clone()], whole.split(2)
        gathered_by_name = [part.clone(), part.clone()]
        of_root = dist.BroadcastOptions()
        of_root.rootRank = 1
        works = [
            group.allreduce(several[0]),
            group.allreduce(several[1], ReduceOp.MAX),
            group.allreduce([several[2]], op=ReduceOp.MIN),
            group.broadcast(several[3], 1),
            group.broadcast(several[4], root=1, **timeout),
            group.reduce(several[5], 0, ReduceOp.MAX),
            group.allgather(gathered, pair[0]),
            group.barrier(**timeout),
            group.allreduce(tensors=[several[8]], opts=dist.AllreduceOptions()),
            group.allreduce(tensor=several[9]),
            group.broadcast([several[10]], opts=of_root),
            group.broadcast(tensors=[several[11]], opts=of_root),
            group.allgather(output_tensors=[gathered_by_name], input_tensors=[pair[1]]),
        ]
        if timeout:
            works.append(group.scatter(part, list(pair) if rank == 1 else [], 1))
        for work in works:
            work.wait()
        if rank == 1:
            several[5].zero_()  # the result of a reduction to one rank is undefined on other ranks
        results.append(torch.cat([*several, *gathered, *gathered_by_name, part]).tolist())
    return results


def test_the_short_forms_of_the_methods_of_a_group_match_gloo():
    for over_shm, over_gloo in run_ranks(call_in_short):
        assert over_shm == over_gloo


def train_compiled_with_buffers() -> tuple[str, list[float]]:
    rank = start_shm()
    torch.manual_seed(0)
    module = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model = torch.compile(module, backend="aot_eager")
    for step in range(2):
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 2 + rank))).sum().backward()
    return dist.get_backend(), module.module[0].weight.grad.flatten().tolist()


def test_ddp_of_a_module_with_buffers_compiles():
    (first, gradient), (_, other) = run_ranks(train_compiled_with_buffers)
    assert first == "shm"
    assert gradient == other

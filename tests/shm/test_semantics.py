"""Results of the ``shm`` process group: equal to gloo's on each rank, and bitwise identical on all ranks."""

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.shm.programs import (
    ARITHMETIC,
    BITWISE,
    DTYPES,
    FLOAT_OPS,
    FLOATS,
    INLINE_NUM_BYTES,
    INTEGERS,
    KINDS,
    LAYOUTS,
    OBJECTS,
    REAL_ONLY,
    SLOT_NUM_BYTES,
    WAITS,
    Operation,
)
from tests.shm.start import PER_HOST, check_programs, start_shm
from tests.support.ranks import Outcome, outcomes_of_ranks, rank_environment, run_ranks

pytestmark = pytest.mark.processes

#: Sizes near the limits of a message, of a slot, and of all-reduces whose work the ranks divide.
BORDERS = [
    *(0, 8, 200, INLINE_NUM_BYTES, SLOT_NUM_BYTES, 3 * SLOT_NUM_BYTES),
    *(SLOT_NUM_BYTES // size for size in (2, 3, 5, 8)),
    *(INLINE_NUM_BYTES * size for size in (3, 5, 8)),
]
#: Operations without a dtype.
WITHOUT_DTYPE = {*OBJECTS, "barrier"}
#: Number of examples per world size; each example has ten programs or more.
NUM_EXAMPLES = {1: 4, 2: 22, 3: 15, 4: 10, 5: 4, 8: 3}


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    kind = draw(st.sampled_from(KINDS))
    dtype = draw(st.sampled_from([dtype for dtype in DTYPES if dtype != "complex64" or kind not in REAL_ONLY]))
    ops = {"complex64": ["SUM"], **dict.fromkeys(FLOATS, FLOAT_OPS)}.get(dtype, [*ARITHMETIC, *BITWISE])
    return Operation(
        kind=kind,
        group=draw(st.integers(0, 2)),
        dtype=dtype,
        op=draw(st.sampled_from(ops)),
        num_bytes=draw(st.sampled_from(BORDERS)),
        extra=draw(st.integers(-1, 1)),
        root=draw(st.integers(0, 7)),
        layout=draw(st.sampled_from(LAYOUTS)),
        waits=draw(st.sampled_from(WAITS)),
        seed=draw(st.integers(0, 1000)),
    )


PROGRAMS = st.lists(st.lists(operations(), min_size=1, max_size=8), min_size=10, max_size=40)


def run_random_programs(world_size: int, num_examples: int) -> None:
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(PROGRAMS)
    def check(programs: list[list[Operation]]) -> None:
        check_programs(programs, world_size)

    check()


@pytest.mark.timeout(900)  # the simplification of a failure starts many ranks
@pytest.mark.parametrize("world_size", NUM_EXAMPLES)
def test_random_programs_match_gloo_and_give_the_same_bits_on_all_ranks(world_size: int):
    run_random_programs(world_size, NUM_EXAMPLES[world_size])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world_size", "per_host"), [(4, 2), (3, 1)])
def test_random_programs_match_gloo_between_hosts(world_size: int, per_host: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(rank_environment, PER_HOST, str(per_host))
    run_random_programs(world_size, 3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_operation_matches_gloo_for_every_dtype_and_size(world_size: int):
    def op_of(dtype: str, number: int) -> str:
        ops = ["SUM"] if dtype == "complex64" else FLOAT_OPS if dtype in FLOATS else [*ARITHMETIC, *BITWISE]
        return ops[number % len(ops)]

    programs = [
        [
            Operation(kind, 0, dtype, op_of(dtype, number), num_bytes, number % 3 - 1, number, "plain", waits, number)
            for number, num_bytes in enumerate(BORDERS)
        ]
        for kind in KINDS
        for dtype in DTYPES
        for waits in ("sync", "async")
        if (dtype != "complex64" or kind not in REAL_ONLY) and (dtype == "float32" or kind not in WITHOUT_DTYPE)
    ]
    check_programs(programs, world_size)


def reduce_odd_tensors() -> None:
    rank = start_shm()
    with_grad = torch.full((3,), float(rank + 1), requires_grad=True)
    dist.all_reduce(with_grad)
    assert with_grad.tolist() == [3.0] * 3
    assert with_grad.requires_grad
    not_a_leaf = torch.full((3,), float(rank + 1), requires_grad=True) * 1
    dist.broadcast(not_a_leaf, 1)
    assert not_a_leaf.tolist() == [2.0] * 3
    with torch.inference_mode():
        made_in_inference = torch.full((30_000,), float(rank + 1))
    for is_asynchronous in (False, True):
        work = dist.all_reduce(made_in_inference, op=ReduceOp.MAX, async_op=is_asynchronous)
        if work is not None:
            time.sleep(0.1 * rank)  # so that one rank leaves the operation to a thread
            work.wait()
        assert made_in_inference.unique().tolist() == [2.0]
    gathered = [torch.empty_like(made_in_inference) for _ in range(2)]
    dist.all_gather(gathered, made_in_inference)
    assert torch.stack(gathered).unique().tolist() == [2.0]
    in_steps = torch.full((6,), float(rank + 1))
    dist.all_reduce(in_steps[::2])
    assert in_steps.tolist() == [3.0, rank + 1.0] * 3


def test_tensors_of_autograd_of_inference_mode_and_with_strides_are_filled():
    run_ranks(reduce_odd_tensors)


def call_unsupported_operations() -> None:
    rank = start_shm()
    with pytest.raises(ValueError, match="BAND"):
        dist.all_reduce(torch.ones(2), op=ReduceOp.BAND)
    with pytest.raises(ValueError, match="one part per rank"):
        dist.all_gather_into_tensor(torch.empty(5), torch.ones(2))
    # No data was sent, so the group still works.
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    assert total.item() == 3


def test_an_unsupported_dtype_or_size_is_an_error_and_the_group_continues():
    run_ranks(call_unsupported_operations)


def average_whole_numbers() -> list[list[int]]:
    rank = start_shm()
    results = []
    for dtype in INTEGERS:
        tensor = torch.tensor([rank + 1, 7, 10 * rank], dtype=getattr(torch, dtype))
        dist.all_reduce(tensor, op=ReduceOp.AVG)
        results.append(tensor.tolist())
    return results


def test_the_average_of_integers_is_truncated():
    assert run_ranks(average_whole_numbers) == [[[1, 7, 5]] * 4] * 2


class TwoBranches(torch.nn.Module):
    """A model that uses one of two layers in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.head = torch.nn.Linear(8, 2)

    def forward(self, values: torch.Tensor, branch: int) -> torch.Tensor:
        return self.head(torch.relu(self.branches[branch](values)))


def train(group: dist.ProcessGroup | None, hook: str = "") -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 300), torch.nn.ReLU(), torch.nn.Linear(300, 40))
    # With several buckets, the hook's collectives would start in a different order on each rank, also over gloo.
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=25 if hook else 0.01)
    if hook:
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        values = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 2 + dist.get_rank()))
        optimizer.zero_grad()
        ddp(values).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train_with_both_backends(hook: str = "") -> list[torch.Tensor]:
    start_shm()
    over_shm = train(None, hook)
    over_gloo = train(dist.new_group(backend="gloo"), hook)
    for of_shm, of_gloo in zip(over_shm, over_gloo, strict=True):
        # Two runs of PowerSGD over gloo differ equally much.
        assert torch.allclose(of_shm, of_gloo, rtol=0, atol=1e-6) if hook else torch.equal(of_shm, of_gloo)
    return over_shm


def test_ddp_of_two_ranks_trains_the_weights_that_it_trains_over_gloo():
    first, second = run_ranks(train_with_both_backends)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_ddp_with_a_hook_that_chains_collectives_trains_the_same_weights():
    """PowerSGD's hook starts collectives, and waits for them, in a callback of a collective's future."""
    run_ranks(train_with_both_backends, "powerSGD")


def train_with_unused_parameters() -> list[torch.Tensor]:
    rank = start_shm()
    torch.manual_seed(0)
    model = TwoBranches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        ddp(torch.full((2, 8), float(rank)), branch=(step + rank) % 3 // 2).sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_ddp_finds_unused_parameters():
    first, second = run_ranks(train_with_unused_parameters)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def call_in_a_callback() -> list[float]:
    rank = start_shm(timeout_s=15)
    if rank == 1:
        time.sleep(0.2)  # so that rank 0 leaves the operation to a thread

    def then_again(future: torch.futures.Future) -> torch.Tensor:
        (tensor,) = future.value()
        dist.all_reduce(tensor)
        return tensor

    work = dist.all_reduce(torch.tensor([rank + 1.0]), async_op=True)
    return work.get_future().then(then_again).wait().tolist()


def test_a_callback_of_a_future_can_call_a_collective():
    assert run_ranks(call_in_a_callback) == [[6.0], [6.0]]


def call_different_collectives(name: str, late_rank: int) -> None:
    rank = start_shm(timeout_s=200)
    many = torch.ones(2_000_000)
    if rank == late_rank:
        time.sleep(0.3)
    if name == "kind":
        dist.all_reduce(torch.ones(4)) if rank == 0 else dist.broadcast(torch.ones(4), 0)
    elif name == "size":
        dist.all_reduce(torch.ones(4 + rank))
    elif name == "kind, in many pieces":
        dist.all_reduce(many) if rank == 0 else dist.broadcast(many, 0)
    elif name == "barrier":
        dist.barrier() if rank == 0 else dist.all_reduce(many)


@pytest.mark.parametrize("late_rank", [0, 1])
@pytest.mark.parametrize("name", ["kind", "size", "kind, in many pieces", "barrier"])
def test_ranks_that_call_different_collectives_get_an_error(name: str, late_rank: int):
    start = time.monotonic()
    outcomes = outcomes_of_ranks(call_different_collectives, name, late_rank)
    assert time.monotonic() - start < 150  # not only after the timeout
    for outcome in outcomes:
        assert_error_contains(outcome, "do not call the same collectives")


def assert_error_contains(outcome: Outcome, text: str) -> None:
    assert outcome.error is not None, outcome
    assert text in outcome.error.strip().splitlines()[-1], outcome

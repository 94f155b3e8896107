""":mod:`lightning_strategies_ext.collectives`: correct results for all dtypes, without unnecessary round trips."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.collectives import TorchCollectives
from tests.support.ranks import outcomes_of_ranks, run_ranks

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]
OPERATIONS = {"sum": torch.Tensor.sum, "min": torch.Tensor.amin, "max": torch.Tensor.amax, "product": torch.Tensor.prod}


def start() -> TorchCollectives:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return TorchCollectives(lambda: torch.device("cpu"))


def rank_env() -> int:
    os.environ["RANK"] = os.environ["LOCAL_RANK"]
    return int(os.environ["RANK"])


def input_of(rank: int, dtype: torch.dtype, shape=(3, 2)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(1, 5, shape, generator=generator)
    return (values > 2) if dtype == torch.bool else values.to(dtype)


def count_collectives(function) -> list[str]:
    """Returns the names of the collectives that ``function`` runs, from torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        function()
    return [event.name for event in profiler.events() if event.name.startswith("c10d::")]


def reduce_everything() -> None:
    rank = rank_env()
    collectives = start()
    world_size = dist.get_world_size()
    for dtype in DTYPES:
        stacked = torch.stack([input_of(r, dtype) for r in range(world_size)])
        for name, operation in OPERATIONS.items():
            if dtype.is_complex and name in ("min", "max"):
                with pytest.raises(ValueError, match="no order"):
                    collectives.reduce(input_of(rank, dtype), reduce_op=name)
                continue
            expected = operation(stacked, 0)
            if dtype == torch.bool and name == "product":
                expected = stacked.all(0)
            elif dtype not in (torch.bool,):
                expected = expected.to(dtype)
            result = collectives.reduce(input_of(rank, dtype), reduce_op=name)
            assert result.dtype == expected.dtype, (dtype, name)
            assert torch.equal(result, expected), (dtype, name)
        for name in ("mean", "AVG", ReduceOp.AVG, None):
            expected = (stacked if dtype.is_floating_point or dtype.is_complex else stacked.double()).mean(0)
            result = collectives.reduce(input_of(rank, dtype), reduce_op=name)
            wanted = dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()
            assert result.dtype == wanted, (dtype, name)
            torch.testing.assert_close(result, expected.to(wanted))


@pytest.mark.processes
def test_reduce_is_right_for_every_dtype_and_operation():
    run_ranks(reduce_everything, world_size=3)


def reduce_odd_layouts() -> None:
    rank = rank_env()
    collectives = start()
    for make in (
        lambda r: input_of(r, torch.float32).t(),
        lambda r: torch.tensor(float(r + 1)).expand(4),
        lambda r: input_of(r, torch.float32, (2, 4))[:, ::2],
        lambda r: torch.empty(0),
        lambda r: torch.tensor(float(r)),
        lambda r: torch.ones(2, requires_grad=True),
    ):
        expected = sum(make(r).detach() for r in range(2)) / 2
        assert torch.equal(collectives.reduce(make(rank)).detach(), expected)
    in_place = torch.full((3,), float(rank))
    assert collectives.reduce(in_place) is in_place
    assert in_place.tolist() == [0.5] * 3
    for unchanged in ("text", 3, None, [1.0]):
        assert collectives.reduce(unchanged) is unchanged
    with pytest.raises(ValueError, match="`reduce_op='median'` is unknown"):
        collectives.reduce(torch.ones(1), reduce_op="median")


@pytest.mark.processes
def test_reduce_takes_any_layout_and_leaves_what_is_no_tensor():
    run_ranks(reduce_odd_layouts)


def reduce_in_subgroup() -> list[float]:
    rank = rank_env()
    collectives = start()
    group = dist.new_group([0, 2])
    return [
        collectives.reduce(torch.tensor(float(rank)), group).item(),
        collectives.reduce(torch.tensor(float(rank)), group, "sum").item(),
    ]


@pytest.mark.processes
def test_reduce_in_a_subgroup_leaves_other_ranks_alone():
    assert run_ranks(reduce_in_subgroup, world_size=3) == [[1.0, 2.0], [1.0, 1.0], [1.0, 2.0]]


def count_each() -> dict[str, list[str]]:
    rank_env()
    collectives = start()
    small = {"path": Path("/some/where"), "flag": True}
    return {
        "reduce": count_collectives(lambda: collectives.reduce(torch.ones(2))),
        "bool": count_collectives(lambda: collectives.broadcast(True)),
        "small": count_collectives(lambda: collectives.broadcast(small)),
        "large": count_collectives(lambda: collectives.broadcast(b"x" * 5000)),
        "decision": count_collectives(lambda: collectives.reduce_boolean_decision(True)),
        "gather": count_collectives(lambda: collectives.all_gather(torch.ones(2))),
        "barrier": count_collectives(lambda: collectives.barrier("here")),
    }


@pytest.mark.processes
def test_each_operation_takes_the_round_trips_it_needs_and_no_barrier():
    assert run_ranks(count_each)[1] == {
        "reduce": ["c10d::allreduce_"],
        "bool": ["c10d::broadcast_"],
        "small": ["c10d::broadcast_"],
        "large": ["c10d::broadcast_", "c10d::broadcast_"],
        "decision": ["c10d::allreduce_"],
        "gather": ["c10d::_allgather_base_", "c10d::_allgather_base_"],  # over gloo, the sizes are compared first
        "barrier": ["c10d::barrier"],
    }


def gather_everything() -> None:
    rank = rank_env()
    collectives = start()
    for dtype in DTYPES:
        for shape in ((), (3,), (2, 0), (2, 3)):
            expected = torch.stack([input_of(r, dtype, shape) for r in range(2)])
            assert torch.equal(collectives.all_gather(input_of(rank, dtype, shape)), expected)
    assert torch.equal(collectives.all_gather(input_of(rank, torch.float32).t())[1], input_of(1, torch.float32).t())
    assert not collectives.all_gather(torch.ones(1, requires_grad=True)).requires_grad


@pytest.mark.processes
def test_all_gather_of_every_dtype_and_shape():
    run_ranks(gather_everything)


def loss_of_gathered(gathered: torch.Tensor, weight: float) -> torch.Tensor:
    return weight * (gathered.sum(0) ** 3).sum() + (gathered[0] * gathered[-1]).sum()


def gather_sizes(backend: str) -> tuple[tuple[int, ...], str, str]:
    rank = rank_env()
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    collectives = TorchCollectives(lambda: torch.device("cpu"))
    none_has_rows = collectives.all_gather(torch.empty(0, 2))
    errors = []
    # In the second call, no rank may receive a tensor of the first one.
    for tensor in (torch.full((3 * rank, 2), 5.0), torch.full((3, 2), 7.0 + rank)):
        try:
            errors.append(str(collectives.all_gather(tensor).flatten().unique().tolist()))
        except (ValueError, RuntimeError) as error:
            errors.append(str(error))
    return tuple(none_has_rows.shape), errors[0], errors[1]


@pytest.mark.processes
def test_a_rank_whose_tensor_is_empty_takes_part_in_all_gather():
    for shape, first, second in [*run_ranks(gather_sizes, "gloo"), *run_ranks(gather_sizes, "cpu:gloo,cuda:gloo")]:
        assert shape == (2, 0, 2)
        assert "with these numbers of elements: rank 0: 0, rank 1: 6." in first
        assert second == "[7.0, 8.0]"
    for shape, first, second in run_ranks(gather_sizes, "shm"):
        assert shape == (2, 0, 2)
        assert "rank 0 calls all_gather of torch.float32, 0 bytes on all ranks together" in first
        assert "rank 1 calls all_gather of torch.float32, 48 bytes on all ranks together" in first
        assert "[5.0]" not in second  # the group is closed after the error


def gather_with_gradients(sub: bool) -> torch.Tensor | None:
    rank = rank_env()
    collectives = start()
    group = dist.new_group([0, 2]) if sub else None
    x = (input_of(rank, torch.float64) * 1.0).requires_grad_()
    gathered = collectives.all_gather(x, group, sync_grads=True)
    loss_of_gathered(gathered, weight=rank + 1.0).backward()
    dist.barrier()  # rank 0 serves the store, which a rank outside of the group may need for longer
    return x.grad


@pytest.mark.processes
@pytest.mark.parametrize("members", [[0, 1, 2], [0, 2]])
def test_gradients_through_all_gather_sum_over_the_ranks_that_used_them(members):
    inputs = {r: (input_of(r, torch.float64) * 1.0).requires_grad_() for r in members}
    stacked = torch.stack([inputs[r] for r in members])
    sum(loss_of_gathered(stacked, weight=r + 1.0) for r in members).backward()
    grads = run_ranks(gather_with_gradients, len(members) == 2, world_size=3)
    for rank in members:
        torch.testing.assert_close(grads[rank], inputs[rank].grad)


def decide() -> list[bool]:
    rank = rank_env()
    collectives = start()
    votes = [(True, True), (False, False), (rank == 0, rank == 0)]
    return [f(v) for v, _ in votes for f in (collectives.reduce_boolean_decision, lambda v: collectives.reduce_boolean_decision(v, all=False))]  # noqa: E501  # fmt: skip


@pytest.mark.processes
def test_reduce_boolean_decision_reduces_with_all_or_any():
    assert run_ranks(decide) == [[True, True, False, False, False, True]] * 2


def barrier_with_a_missing_rank() -> None:
    rank = rank_env()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=3))
    if rank == 0:
        store.set("rank 0", "has connected")
        TorchCollectives(lambda: torch.device("cpu")).barrier("the meeting")
    else:
        store.wait(["rank 0"])
        raise KeyError("left early")


@pytest.mark.processes
def test_the_error_of_a_failed_barrier_has_its_name():
    outcome = outcomes_of_ranks(barrier_with_a_missing_rank)[0]
    assert "Rank 0: barrier the meeting failed" in outcome.error


def broadcast_module() -> dict[str, torch.Tensor]:
    rank = rank_env()
    collectives = start()
    torch.manual_seed(rank)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    module[1].num_batches_tracked.fill_(rank + 5)
    collectives.broadcast_module(module)
    return module.state_dict()


@pytest.mark.processes
def test_broadcast_module_gives_all_ranks_the_weights_and_buffers_of_the_first():
    first, second = run_ranks(broadcast_module)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["1.num_batches_tracked"].item() == 5


def test_without_a_process_group_every_collective_is_the_identity():
    collectives = TorchCollectives(lambda: torch.device("cpu"))
    tensor = torch.ones(2)
    assert collectives.reduce(tensor) is tensor
    assert collectives.all_gather(tensor) is tensor
    assert collectives.broadcast("a") == "a"
    assert collectives.reduce_boolean_decision(False) is False
    collectives.barrier()


def leave_many_groups(backend: str) -> int:
    rank, num_left = rank_env(), 0
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
    for number in range(100):
        own_store = dist.PrefixStore(str(number), store)
        dist.init_process_group(backend, store=own_store, rank=rank, world_size=2)
        dist.all_gather_object([None, None], {"rank": rank}, dist.new_group(backend="gloo"))
        process_group.stop()
        num_left += 1
    return num_left


def use_tensors_of_the_host_over_a_backend_of_gpus() -> list[list[float]]:
    """Simulates NCCL with a group that accepts only copies of tensors, as if they were on a GPU."""
    on_gpu: list[torch.Tensor] = []
    move, device = torch.Tensor.to, torch.device("cuda", 0)

    def to(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if args[:1] != (device,):
            return move(tensor, *args, **kwargs)
        on_gpu.append(tensor.clone())
        return on_gpu[-1]

    class OfGPUs(dist.ProcessGroup):
        def __init__(self, store: dist.Store, rank: int, size: int) -> None:
            super().__init__(rank, size)
            self.gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))

        def allreduce(self, tensors, opts):
            self._check(tensors[0])
            return self.gloo.allreduce(tensors, opts)

        def _allgather_base(self, output, tensor, opts=None):
            self._check(tensor)
            return self.gloo.allgather([list(output.chunk(self.size()))], [tensor])

        all_gather_single = _allgather_base  # the name since torch 2.13

        def _check(self, tensor: torch.Tensor) -> None:
            if all(tensor.data_ptr() != each.data_ptr() for each in on_gpu):
                raise RuntimeError("No backend type associated with device type cpu")

        def getBackendName(self) -> str:
            return "of_gpus"

    torch.Tensor.to = to  # type: ignore[method-assign]
    dist.Backend.register_backend("of_gpus", lambda store, rank, size, timeout: OfGPUs(store, rank, size))
    number = rank_env() + 1
    dist.init_process_group("of_gpus")
    collectives = TorchCollectives(lambda: device)
    mean = torch.tensor([float(number), 5.0])
    same = collectives.reduce(mean)
    assert same is mean
    total = collectives.reduce(torch.tensor([number == 1]), reduce_op="sum")
    gathered = collectives.all_gather(torch.tensor([[number]], dtype=torch.int16))
    state = collectives.gather_list(torch.tensor([float(number)]))
    return [mean.tolist(), total.tolist(), gathered.flatten().tolist(), torch.cat(state).tolist()]


@pytest.mark.processes
def test_cpu_tensors_are_reduced_and_gathered_over_a_backend_for_gpus():
    assert run_ranks(use_tensors_of_the_host_over_a_backend_of_gpus) == [[[1.5, 5.0], [1], [1, 2], [1.0, 2.0]]] * 2


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_group_can_be_left_at_once_after_a_collective(backend):
    """In torch 2.5, ``destroy_process_group`` alone may wait indefinitely in this case."""
    assert run_ranks(leave_many_groups, backend) == [100, 100]

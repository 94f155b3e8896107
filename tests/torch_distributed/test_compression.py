"""Compressed exchanges: their distance from the exact mean, and the compensation of omitted values."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext import (
    BFloat16,
    Compression,
    DDPSpawnStrategy,
    DDPStrategy,
    DiLoCo,
    Float16,
    LocalSGD,
    PowerSGD,
    TopK,
)
from lightning_strategies_ext.collectives import LocalCollectives
from lightning_strategies_ext.fabric import DDPStrategy as FabricDDPStrategy
from lightning_strategies_ext.torch_distributed.compression import codecs, compressed_gradients, host_groups
from lightning_strategies_ext.torch_distributed.compression.codecs import Residuals
from lightning_strategies_ext.torch_distributed.compression.compressed_gradients import CompressedGradients
from lightning_strategies_ext.torch_distributed.compression.host_groups import HostGroups
from lightning_strategies_ext.torch_distributed.feature import FeatureContext
from lightning_strategies_ext.torch_distributed.gradient_sync import GradientSyncOptions
from tests.support.models import make_trainer
from tests.support.ranks import run_ranks

SHAPES = [(96, 64), (96,), (16, 4, 9, 3), (2, 3), ()]
CASES: dict[str, tuple[Compression, torch.dtype, int]] = {
    "bf16": (BFloat16(), torch.float32, 2),
    "fp16": (Float16(), torch.float32, 2),
    "powersgd": (PowerSGD(rank=2, warmup_steps=0), torch.float64, 5),
    "powersgd of bf16": (PowerSGD(rank=2, warmup_steps=0), torch.bfloat16, 3),
    "powersgd after two steps": (PowerSGD(rank=2, warmup_steps=2), torch.float64, 3),
    "topk": (TopK(fraction=0.1, warmup_steps=0), torch.float64, 5),
}


# --- arguments ---


@pytest.mark.parametrize(
    ("make", "error", "expected_text"),
    [
        (
            lambda: DDPStrategy(compression="zip"),
            ValueError,
            "`compression='zip'` is unknown. Use one of 'bf",
        ),
        (lambda: DDPStrategy(compression=4), TypeError, "`compression` must be a name such as 'bf16'"),
        (lambda: DDPStrategy(compression=Compression()), TypeError, "`compression` must be a name such as 'bf16'"),
        (lambda: PowerSGD(rank=0), ValueError, "`rank=0` must be at least 1"),
        (lambda: PowerSGD(rank=1.5), TypeError, "`rank` must be a whole number, got 1.5"),
        (lambda: TopK(fraction=0), ValueError, "`fraction` must be above 0 and at most 1, got 0"),
        (lambda: TopK(warmup_steps=-1), ValueError, "`warmup_steps=-1` must be at least 0"),
        (lambda: LocalSGD(period=0), ValueError, "`period=0` must be at least 1"),
        (lambda: DiLoCo(momentum=1), ValueError, "`momentum` must be at least 0 and below 1, got 1"),
        (lambda: DiLoCo(learning_rate="0.7"), TypeError, "`learning_rate` must be a number, got '0.7'"),
        (
            lambda: DDPStrategy(compression="bf16", ddp_comm_hook=lambda state, bucket: None),
            ValueError,
            "both exchange the gradients",
        ),
        (
            lambda: DDPStrategy(compression="topk", process_group=object()),
            ValueError,
            "`process_group` exchanges among some",
        ),
        (
            lambda: DDPStrategy(compression="localsgd", uneven_inputs="join"),
            ValueError,
            "period=32, warmup_steps=0)` averages the models of all",
        ),
        (
            lambda: DDPStrategy(compression="topk", find_unused_parameters=True),
            ValueError,
            "DDP drops this for parameters that no rank has used",
        ),
        (
            lambda: DDPSpawnStrategy(elastic=True, compression="diloco", uneven_inputs="stop"),
            ValueError,
            "with `elastic=True`: a commit has the state of one rank",
        ),
        (lambda: FabricDDPStrategy(compression="powersgd"), ValueError, "Use 'bf16' or 'fp16' under Fabric"),
    ],
)
def test_invalid_arguments_are_refused(make: Callable[[], Any], error: type[Exception], expected_text: str) -> None:
    with pytest.raises(error) as raised:
        make()
    assert expected_text in str(raised.value)


def test_residuals_of_scaled_gradients_are_refused() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    scaled = MixedPrecision("16-mixed", "cuda", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="cannot be combined with `precision='16-mixed'`, which scales"):
        make_trainer(DDPStrategy(compression="powersgd", precision_plugin=scaled))
    make_trainer(DDPStrategy(compression="fp16", precision_plugin=scaled))


# --- gradients ---


class Parameters(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.of = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((parameter * gradient).sum() for parameter, gradient in zip(self.of, gradients, strict=True))


def gradients_of(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns the contributions of a rank to a step; the first contribution is a matrix of rank two."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    columns = torch.randn(2, 96, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    found[0] = columns.T @ torch.randn(2, 64, generator=generator, dtype=torch.float64)
    return [each.to(dtype) for each in found]


def context_of(device: torch.device) -> FeatureContext:
    return FeatureContext(GradientSyncOptions(), {}, device, LocalCollectives(0, 1))


def exchange_some(compression: Compression, dtype: torch.dtype, num_steps: int) -> dict[str, Any]:
    """Runs steps of a model in DDP; returns the results, the exact means, and the residuals at the end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Parameters(dtype), bucket_cap_mb=0.02, gradient_as_bucket_view=True)
    exchange = CompressedGradients(compression, context_of(torch.device("cpu")))
    exchange.wrap(model)
    found_values, exact, magnitude = [], [], []
    for step in range(num_steps):
        model.zero_grad()
        model(gradients_of(rank, step, dtype)).backward()
        found_values.append([parameter.grad.clone() for parameter in model.parameters()])
        of_all = list(zip(*(gradients_of(other, step, dtype) for other in range(size)), strict=True))
        exact.append([sum(each).div(size) for each in of_all])
        magnitude.append([sum(part.abs() for part in each).div(size) for each in of_all])
    state = exchange.state_dict()
    exchange.close()
    return {"got": found_values, "exact": exact, "magnitude": magnitude, "state": state}


def exchange_all(backend: str, num_hosts: int) -> dict[str, Any]:
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    host_groups.host_identity = lambda: f"host {rank * num_hosts // size}"
    dist.init_process_group(backend, rank=rank, world_size=size)
    found = {name: exchange_some(*case) for name, case in CASES.items()}
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module", params=[("gloo", 2, 1), ("shm", 4, 2), ("gloo", 3, 2)], ids=str)
def exchanged(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Provides the results of all cases by rank, for a backend, a number of ranks, and a number of hosts."""
    backend, size, num_hosts = request.param
    return run_ranks(exchange_all, backend, num_hosts, world_size=size)


@pytest.mark.processes
def test_all_ranks_have_bitwise_identical_gradients(exchanged: list[dict[str, Any]]) -> None:
    for name in CASES:
        for other in exchanged[1:]:
            for one, another in zip(_flat(exchanged[0][name]["got"]), _flat(other[name]["got"]), strict=True):
                assert torch.equal(one, another), name


@pytest.mark.processes
@pytest.mark.parametrize(("name", "bits"), [("bf16", 8), ("fp16", 11)])
def test_a_cast_rounds_each_gradient_and_each_sum(exchanged: list[dict[str, Any]], name: str, bits: int) -> None:
    found = exchanged[0][name]
    for found_values, exact, magnitude in zip(
        *(_flat(found[key]) for key in ("got", "exact", "magnitude")), strict=True
    ):
        # The rounding error is half a unit of the last of `bits` bits; the smallest unit of fp16 is 2^-24.
        limit = len(exchanged) * (1.01 * 2.0**-bits * magnitude + 2.0**-24)
        assert ((found_values - exact).abs() <= limit).all()
    assert any(not torch.equal(*pair) for pair in zip(_flat(found["got"]), _flat(found["exact"]), strict=True))
    assert not found["state"]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["powersgd", "topk", "powersgd of bf16"])
def test_residuals_are_kept_and_exchanged_later(exchanged: list[dict[str, Any]], name: str) -> None:
    found = exchanged[0][name]
    is_half = "bf16" in name
    missing = found["state"]["residuals"]
    for index, shape in enumerate(SHAPES):
        found_values, exact = (sum(step[index].double() for step in found[key]) for key in ("got", "exact"))
        residual = missing[f"of.{index}"].view(shape)
        torch.testing.assert_close(
            found_values + residual, exact, rtol=0, atol=0.15 if is_half else 1e-5, check_dtype=False
        )
        assert residual.dtype == (torch.float32 if is_half else torch.float64)
    assert missing["of.2"].abs().max() > 1e-2, "the compression has omitted nothing"


@pytest.mark.processes
def test_a_matrix_of_as_many_directions_as_are_sent_is_exact(exchanged: list[dict[str, Any]]) -> None:
    found = exchanged[0]["powersgd"]
    for found_values, exact in zip(found["got"], found["exact"], strict=True):
        torch.testing.assert_close(found_values[0], exact[0], rtol=1e-9, atol=1e-9)
        assert not torch.allclose(found_values[2], exact[2], atol=1e-2)


@pytest.mark.processes
def test_the_first_steps_can_be_exact(exchanged: list[dict[str, Any]]) -> None:
    found = exchanged[0]["powersgd after two steps"]
    are_exact = [
        all(torch.allclose(*pair, rtol=1e-12) for pair in zip(found_values, exact, strict=True))
        for found_values, exact in zip(found["got"], found["exact"], strict=True)
    ]
    assert are_exact == [True, True, False]


@pytest.mark.processes
def test_the_number_of_largest_elements_sent_is_the_argument(exchanged: list[dict[str, Any]]) -> None:
    """One rank per host and shard sends the given number of elements; these may overlap."""
    num_senders = len(exchanged) if len(exchanged) < 4 else 2
    matrix = exchanged[0]["topk"]["got"][0][0]
    sent, num_requested = int((matrix != 0).sum()), round(0.1 * matrix.numel())
    assert num_requested <= sent <= num_senders * num_requested


def _flat(steps: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for step in steps for tensor in step]


# --- selection of large gradients ---


@pytest.mark.parametrize("size", [1024, 5000, 300_000])
@pytest.mark.parametrize(
    "make",
    [torch.randn, lambda size: torch.randn(size) ** 5, torch.ones, torch.zeros],
    ids=["normal", "heavy tails", "all alike", "zeros"],
)
def test_top_k_leaves_no_larger_residual_than_a_random_choice(size: int, make: Callable[[int], Tensor]) -> None:
    """The test checks the bound that convergence requires: Stich et al. 2018, definition 2.1."""
    values, count = make(size), size // 100
    indices = codecs._largest(values, count)
    assert len(indices.unique()) == len(indices) == count
    residual = values.index_fill(0, indices, 0.0)
    assert residual.square().sum() <= (1 - count / size) * values.square().sum() * (1 + 1e-5)


def test_the_chosen_elements_are_nearly_the_largest() -> None:
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(1)).pow(3)
    chosen = values[codecs._largest(values, 3000)].abs().sum()
    assert chosen >= 0.99 * values.abs().topk(3000).values.sum()


# --- shards ---


@pytest.mark.parametrize("num_inside", [1, 2, 3, 5])
@pytest.mark.parametrize("sizes", [[7], [1, 1, 1], [100, 1, 1, 1, 100], [0, 5, 0], [1] * 20])
def test_each_tensor_is_in_one_shard(num_inside: int, sizes: list[int]) -> None:
    shards = HostGroups(None, None, num_inside, 0, torch.device("cpu")).shards(sizes)
    assert [index for shard in shards for index in shard] == list(range(len(sizes)))
    assert len(shards) == num_inside
    largest = max(sum(sizes[index] for index in shard) for shard in shards)
    assert largest <= sum(sizes) / num_inside + max(sizes)


# --- GPU memory, simulated by a tensor that records the streams that use it ---


class OnGPU(Tensor):
    """A simulated GPU tensor: freed memory returns to the stream that allocated it."""

    is_cuda = True
    uses: ClassVar[list[tuple[list[float], str]]] = []

    def record_stream(self, stream: Any) -> None:
        self.uses.append((self.tolist(), stream))


def test_memory_of_a_residual_is_not_reused_before_the_exchange_stream_has_used_it(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream of the exchange")
    monkeypatch.setattr(OnGPU, "uses", [])
    residuals, parameters = Residuals(), [torch.zeros(2).as_subclass(OnGPU) for _ in range(2)]
    for parameter in parameters:  # in the stream of the training, as in the loading of a checkpoint
        residuals.distribute(parameter, torch.full((2,), 6.0), 2)
    assert residuals.flat(parameters[:1], parameters[0]).tolist() == [3, 3]
    gradients = torch.ones(2).as_subclass(OnGPU)
    residuals.add_to_gradients(parameters[1:], gradients, 2)
    assert gradients.tolist() == [7, 7]
    assert OnGPU.uses == [([3, 3], "stream of the exchange"), ([0, 0], "stream of the exchange")]


# --- groups of GPUs, with a device object of type cuda ---


def groups_on_a_gpu(backend: str) -> list[bool]:
    dist.init_process_group(backend, rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    found = []
    for device in ("cuda", "cpu"):
        of_ranks = HostGroups.create(torch.device(device), None)
        found.append(of_ranks.inter_host is dist.group.WORLD)
        of_ranks.close()
        found.append(dist.is_initialized())
    dist.barrier()  # a rank that exits would interrupt the connections of the other rank
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_gradients_on_gpus_are_exchanged_in_the_group_of_sync_batch_norm() -> None:
    assert run_ranks(groups_on_a_gpu, "cpu:gloo") == [[True, True, False, True]] * 2
    assert run_ranks(groups_on_a_gpu, "gloo") == [[False, True, False, True]] * 2


def exchange_among_other_collectives(size: int) -> dict[str, list[str]]:
    """Returns the events of a backward pass of a model that also calls collectives of the default group."""
    rank = int(os.environ["LOCAL_RANK"])
    host_groups.host_identity = lambda: f"host {rank * 2 // size}"
    dist.init_process_group("gloo", rank=rank, world_size=size)
    events: list[str] = []

    class Waited(torch.futures.Future):
        def __new__(cls, devices: Any = None) -> "Waited":
            return super().__new__(cls)

        def __init__(self, devices: Any = None) -> None:
            super().__init__()

        def wait(self) -> Any:
            events.append("wait")
            return super().wait()

    class Stream:
        def wait_stream(self, other: Any) -> None:
            events.append("exchange")

    compressed_gradients.side_stream, compressed_gradients.Future = lambda device: Stream(), Waited  # type: ignore[assignment]
    torch.cuda.current_stream, torch.cuda.stream = Mock(), lambda stream: nullcontext()  # type: ignore[assignment]
    Tensor.record_stream = Mock()  # type: ignore[method-assign]
    found = {}
    for name, options in {"none": {}, "unused parameters": {"find_unused_parameters": True}, "sparse": {}}.items():
        events.clear()
        module = nn.Embedding(4, 4, sparse=name == "sparse")
        model = DistributedDataParallel(nn.Sequential(module, nn.Linear(4, 1)), bucket_cap_mb=1e-5, **options)
        exchange = CompressedGradients(BFloat16(), context_of(torch.device("cuda", 0)))
        exchange.wrap(model)
        model(torch.tensor([rank % 4])).sum().backward()
        exchange.close()
        found[name] = list(dict.fromkeys(events))
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_an_exchange_in_its_own_groups_does_not_overlap_default_group_collectives() -> None:
    apart = {"none": ["exchange"], "unused parameters": ["exchange", "wait"], "sparse": ["exchange", "wait"]}
    assert run_ranks(exchange_among_other_collectives, 4, world_size=4) == [apart] * 4

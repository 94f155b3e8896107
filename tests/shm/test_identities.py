"""Collectives with different identities raise an error on all ranks, before a wrong number is used."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_strategies_ext.identities import BATCH, BUCKET, GRADIENTS, IdentityKind, current
from lightning_strategies_ext.shm.native_build import NATIVE_VARIABLE
from tests.shm.start import start_shm
from tests.support import ranks
from tests.support.ranks import outcomes_of_ranks, run_ranks

pytestmark = pytest.mark.processes

BUFFERS = int(IdentityKind.BUFFERS)
SECOND, THIRD = GRADIENTS + 2 * BATCH, GRADIENTS + 3 * BATCH


@pytest.fixture(autouse=True, params=["compiled", "in rounds"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ranks.rank_environment, NATIVE_VARIABLE, "1" if request.param == "compiled" else "0")
    return request.param


def all_reduce(tensor: torch.Tensor, is_asynchronous: bool) -> None:
    work = dist.all_reduce(tensor, async_op=is_asynchronous)
    if work is not None:
        time.sleep(0.1)  # the group's thread finds the mismatch
        work.wait()


def broadcast(tensor: torch.Tensor, is_asynchronous: bool) -> None:
    work = dist.broadcast(tensor, 1, async_op=is_asynchronous)
    if work is not None:
        work.wait()


def exchange(name: str, is_asynchronous: bool, numel: int, identities: list[int]) -> tuple[str, bool]:
    """Returns the text of the error on this rank, and whether its tensor is unchanged."""
    rank = start_shm()
    own = torch.full((numel,), rank + 1.0)
    tensor = own.clone()
    dist.all_reduce(torch.ones(3))
    time.sleep(0.1 * rank)
    current.identity = identities[rank]
    try:
        {"all_reduce": all_reduce, "broadcast": broadcast}[name](tensor, is_asynchronous)
    except dist.DistBackendError as error:
        return str(error), torch.equal(tensor, own)
    return "", torch.equal(tensor, own)


@pytest.mark.parametrize("numel", [1, 300_000])
@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_both_ranks_get_an_error_that_names_both_identities_and_calls(name: str, is_asynchronous: bool, numel: int):
    identities = [SECOND + BUCKET, THIRD + BUCKET]
    for text, is_unchanged in run_ranks(exchange, name, is_asynchronous, numel, identities):
        assert "the ranks do not call the same collectives: rank 0 exchanges gradients of batch 1, bucket 0" in text
        assert "; rank 1 exchanges gradients of batch 2, bucket 0" in text
        assert text.count(f"{__file__}:") == 2
        assert "left out a backward pass" in text
        assert is_unchanged


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_a_rank_that_states_no_identity_gets_the_error_of_the_others(name: str):
    for text, is_unchanged in run_ranks(exchange, name, False, 1000, [SECOND, 0, THIRD], world_size=3):
        assert "rank 0 exchanges gradients of batch 1 by" in text
        assert "rank 2 exchanges gradients of batch 2 by" in text
        assert is_unchanged


@pytest.mark.parametrize("identities", [[SECOND, BUFFERS], [SECOND + BUCKET, SECOND + 2 * BUCKET]])
def test_kinds_and_buckets_are_compared(identities: list[int]):
    for text, _ in run_ranks(exchange, "all_reduce", False, 4, identities):
        assert "do not call the same collectives" in text


@pytest.mark.parametrize(
    "identities", [[SECOND, 0], [0, BUFFERS], [SECOND, GRADIENTS + BUCKET], [GRADIENTS, THIRD], [THIRD, THIRD]]
)
def test_fields_that_a_rank_does_not_state_are_not_compared(identities: list[int]):
    for text, is_unchanged in run_ranks(exchange, "all_reduce", False, 4, identities):
        assert text == ""
        assert not is_unchanged


def wait_in_a_barrier() -> str:
    rank = start_shm()
    current.identity = [SECOND, THIRD][rank]
    dist.barrier()
    return "passed"


def test_barriers_are_not_compared():
    assert run_ranks(wait_in_a_barrier) == ["passed"] * 2


def call_one_of_two(swapped: bool) -> str:
    rank = start_shm()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    calls = [partial(dist.broadcast, tensor, 0), partial(dist.all_reduce, tensor)]
    try:
        calls[rank != swapped]()
    except dist.DistBackendError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("swapped", [False, True])
def test_different_collectives_are_named_with_both_call_sites(swapped: bool):
    for text in run_ranks(call_one_of_two, swapped):
        assert "calls broadcast of torch.float32 with root 0" in text
        assert "calls all_reduce" in text
        assert "`broadcast` in call_one_of_two" in text
        assert "`all_reduce` in call_one_of_two" in text


def fail_and_do_not_run() -> str:
    rank = start_shm()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    current.identity = [SECOND, THIRD][rank]
    if rank == 1:
        dist.all_reduce(tensor, async_op=True)
        time.sleep(20)  # the rank neither waits nor exits; the group's thread responds
        return ""
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(tensor)
    assert time.monotonic() - start < 10
    return str(caught.value)


def test_a_rank_gets_the_error_while_the_other_does_not_wait():
    text = outcomes_of_ranks(fail_and_do_not_run)[0].value
    assert "rank 1 exchanges gradients of batch 2" in text


def reduce_complex_numbers() -> complex:
    start_shm()
    tensor = torch.full((3,), 1 + 2j, dtype=torch.complex128)
    dist.all_reduce(tensor)
    return tensor[0].item()


def test_data_of_the_largest_dtype_is_aligned_after_the_header():
    assert run_ranks(reduce_complex_numbers) == [2 + 4j] * 2

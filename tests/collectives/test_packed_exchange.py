""":mod:`lightning_strategies_ext.collectives.packed_exchange`: one message, with values matched by name."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_strategies_ext.collectives import Collectives, LocalCollectives, packed_exchange
from lightning_strategies_ext.collectives.digest_comparison import (
    MAX_CONTRIBUTIONS,
    DeferredComparison,
    DifferentPartsError,
)
from lightning_strategies_ext.collectives.packed_exchange import PackedExchange, parts_of
from lightning_strategies_ext.torch_distributed.collectives import TorchCollectives
from tests.support.ranks import run_ranks

TIMEOUT_S = 60


class ThreadCollectives(Collectives):
    """Collectives of ranks that are threads of one process; counts the operations of this rank."""

    def __init__(self, rank: int, size: int, rounds: dict[int, dict[int, Any]], changed: threading.Condition) -> None:
        super().__init__(lambda: torch.device("cpu"))
        self._rank, self._size, self._rounds, self._changed = rank, size, rounds, changed
        self.operations: list[str] = []

    def rank(self, group: Any = None) -> int:
        return self._rank

    def world_size(self, group: Any = None) -> int:
        return self._size

    def _of_all(self, operation: str, value: Any) -> list[Any]:
        self.operations.append(operation)
        with self._changed:
            values = self._rounds.setdefault(len(self.operations), {})
            values[self._rank] = (operation, value)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(values) == self._size, TIMEOUT_S)
        assert {kind for kind, _ in values.values()} == {operation}
        return [values[rank][1] for rank in range(self._size)]

    def _all_reduce(self, tensor: Tensor, op: str, group: Any) -> None:
        rows = torch.stack(self._of_all("all_reduce", tensor.clone()))
        tensor.copy_({"sum": rows.sum(0), "min": rows.amin(0), "max": rows.amax(0)}[op])

    def _all_gather(self, output: Tensor, tensor: Tensor, group: Any) -> None:
        output.copy_(torch.cat(self._of_all("all_gather", tensor.clone())))

    def _broadcast(self, tensors: Iterable[Tensor], src: int) -> None:
        for tensor in tensors:
            tensor.copy_(self._of_all("broadcast", tensor.clone())[src])

    def start_all_reduce(self, tensor: Tensor, op: str, name: str) -> Callable[[], None]:
        self._all_reduce(tensor, op, None)
        return lambda: None

    def start_all_gather(self, output: Tensor, tensor: Tensor, name: str) -> Callable[[], None]:
        self._all_gather(output, tensor, None)
        return lambda: None

    def barrier(self, name: str | None = None) -> None:
        self._of_all("barrier", None)


def on_ranks(size: int, function: Callable[[ThreadCollectives], Any]) -> list[Any]:
    """Returns what the function returns or raises on each rank."""
    rounds: dict[int, dict[int, Any]] = {}
    changed, outcomes = threading.Condition(), dict[int, Any]()

    def run(rank: int) -> None:
        try:
            outcomes[rank] = function(ThreadCollectives(rank, size, rounds, changed))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[rank] for rank in range(size)]


def rows_of(rank: int) -> list[tuple[str, str, Tensor]]:
    """Returns values of all reductions, in several dtypes and shapes; every second rank has the reverse order."""
    rows = [
        ("loss", "mean", torch.tensor(0.1 + rank)),
        ("total", "sum", torch.tensor(1.5 * rank, dtype=torch.float64)),
        ("count", "sum", torch.tensor(2**40 + rank)),
        ("largest", "max", torch.tensor([1.0, -2.0, 3.0]) * (rank - 1)),
        ("smallest", "min", torch.tensor(5 - rank, dtype=torch.int16)),
        ("half", "mean", torch.full((2, 2), float(rank), dtype=torch.bfloat16)),
        ("nothing", "sum", torch.empty(0)),
    ]
    return rows[:: -1 if rank % 2 else 1]


def reduce_all(collectives: Collectives) -> dict[str, Tensor]:
    parts = parts_of(rows_of(collectives.rank()))
    values = PackedExchange("test").start(collectives, "kind", parts, list)()
    return dict(zip(parts[0], values, strict=True))


def assert_reduced(reduced: dict[str, Tensor], size: int) -> None:
    ranks = range(size)
    inputs = [{key: value for key, _, value in rows_of(rank)} for rank in ranks]
    for key, op, _ in rows_of(0):
        rows = torch.stack([each[key] for each in inputs])
        expected = {
            "mean": lambda rows: rows.sum(0) / size,
            "sum": lambda rows: rows.sum(0),
            "min": lambda rows: rows.amin(0),
            "max": lambda rows: rows.amax(0),
        }[op](rows)
        assert reduced[key].dtype == inputs[0][key].dtype, key
        torch.testing.assert_close(reduced[key], expected.to(rows.dtype), msg=key)


@pytest.mark.parametrize("size", [2, 3])
def test_all_reductions_and_dtypes_are_right_and_the_order_of_values_does_not_matter(size: int) -> None:
    outcomes = on_ranks(size, lambda collectives: (reduce_all(collectives), collectives.operations))
    for reduced, operations in outcomes:
        assert_reduced(reduced, size)
        assert operations == ["all_gather"]


def test_values_that_do_not_fit_into_the_message_take_one_more_all_gather() -> None:
    def run(collectives: ThreadCollectives) -> Any:
        rows = [
            ("many", "sum", torch.arange(1001.0) + collectives.rank()),
            ("double", "mean", torch.arange(7.0, dtype=torch.float64)),
        ]
        many, double = PackedExchange("test").start(collectives, "kind", parts_of(rows), list)()
        return many, double, collectives.operations

    for many, double, operations in on_ranks(2, run):
        assert torch.equal(many, 2 * torch.arange(1001.0) + 1)
        assert torch.equal(double, torch.arange(7.0, dtype=torch.float64))
        assert operations == ["all_gather"] * 2


def test_many_ranks_compare_digests_and_reduce_with_one_all_reduce_per_segment(monkeypatch: Any) -> None:
    monkeypatch.setattr(packed_exchange, "MAX_GATHERED_RANKS", 1)
    for reduced, operations in on_ranks(3, lambda collectives: (reduce_all(collectives), collectives.operations)):
        assert_reduced(reduced, 3)
        assert set(operations) == {"all_reduce"}


@pytest.mark.parametrize("max_gathered", [64, 1])
@pytest.mark.parametrize("different", ["key", "op", "dtype", "shape", "kind", "number"])
def test_different_values_are_an_error_on_all_ranks(different: str, max_gathered: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(packed_exchange, "MAX_GATHERED_RANKS", max_gathered)

    def run(collectives: ThreadCollectives) -> None:
        is_odd = collectives.rank() == 1
        row = ("loss", "mean", torch.tensor(1.0))
        changed = {
            "key": ("other", "mean", torch.tensor(1.0)),
            "op": ("loss", "sum", torch.tensor(1.0)),
            "dtype": ("loss", "mean", torch.tensor(1.0, dtype=torch.float64)),
            "shape": ("loss", "mean", torch.ones(1)),
        }
        rows = [changed.get(different, row) if is_odd else row]
        if different == "number":
            rows.append((f"more{is_odd}", "sum", torch.ones(500 if is_odd else 1)))
        kind = "other" if is_odd and different == "kind" else "kind"
        rank = collectives.rank()
        PackedExchange("test").start(collectives, kind, parts_of(rows), lambda: f"values of rank {rank}")()

    for error in on_ranks(4, run):
        assert isinstance(error, DifferentPartsError)
        assert error.has_all
        assert [(each.ranks, each.description) for each in error.contributions] == [
            ([0, 2, 3], "values of rank 0"),
            ([1], "values of rank 1"),
        ]


def test_an_error_describes_a_few_of_many_different_contributions() -> None:
    def run(collectives: ThreadCollectives) -> None:
        key = f"key{collectives.rank()}"
        PackedExchange("test").start(collectives, "kind", ((key,), ("sum",), [torch.ones(())]), lambda: key)()

    size = MAX_CONTRIBUTIONS + 2
    for error in on_ranks(size, run):
        assert not error.has_all
        assert [each.description for each in error.contributions] == [f"key{rank}" for rank in range(size - 2)]


def test_an_error_states_which_ranks_have_more_values_to_come() -> None:
    def run(collectives: ThreadCollectives) -> None:
        parts = parts_of((f"key{index}", "sum", torch.ones(())) for index in range(collectives.rank() + 1))
        is_final = collectives.rank() == 1
        PackedExchange("test").start(collectives, "kind", parts, list, is_final=is_final)()

    for error in on_ranks(2, run):
        assert [each.is_final for each in error.contributions] == [False, True]


@pytest.mark.parametrize("num_values", [1, 600])
def test_ranks_without_values_receive_those_of_other_ranks(num_values: int) -> None:
    def run(collectives: ThreadCollectives) -> Any:
        rank = collectives.rank()
        rows = [
            ("sum", "sum", torch.full((num_values,), 1.0 + rank)),
            ("count", "sum", torch.tensor(rank)),
        ]
        own = None if rank == 1 else parts_of(rows[:: -1 if rank == 2 else 1])
        functions = lambda: f"values of rank {rank}", lambda: {rank}
        return PackedExchange("test").run_with_absent(collectives, "kind", own, *functions)

    for description, attached, (total, count) in on_ranks(3, run):
        assert description == "values of rank 0"
        assert attached == {0}
        assert torch.equal(total, torch.full((num_values,), 4.0))
        assert count == 2


def test_nothing_is_received_if_no_rank_has_values() -> None:
    def run(collectives: ThreadCollectives) -> Any:
        own = None if collectives.rank() else parts_of(())
        return PackedExchange("test").run_with_absent(collectives, "kind", own, list, list), collectives.operations

    assert on_ranks(2, run) == [(None, ["all_gather"])] * 2


def test_the_only_rank_keeps_its_values() -> None:
    for collectives in (LocalCollectives(1, 3), *on_ranks(1, lambda collectives: collectives)):
        own = torch.tensor([1.0, 2.0])
        (value,) = PackedExchange("test").start(collectives, "kind", (("sum",), ("sum",), [own]), list)()
        assert torch.equal(value, own)
        assert value is not own


# --- exchanges that the host compares later, as on a GPU ---

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [2, 3])
def test_exchanges_that_are_compared_later_give_the_same_values(size: int) -> None:
    store = dist.HashStore()

    def run(collectives: ThreadCollectives) -> Any:
        exchange = PackedExchange("test", CPU, lambda: store)
        parts = parts_of(rows_of(collectives.rank()))
        reduced = exchange.start_deferred(collectives, "kind", parts, list)()
        exchange.check_deferred(waits=True)
        operations = [*collectives.operations]
        compared = exchange.start(collectives, "kind", parts, list)()
        return dict(zip(parts[0], reduced, strict=True)), dict(zip(parts[0], compared, strict=True)), operations

    for reduced, compared, operations in on_ranks(size, run):
        assert_reduced(reduced, size)
        assert_reduced(compared, size)
        assert operations == ["all_gather"]


@pytest.mark.parametrize("num_values", [1, 600])
def test_different_values_that_are_compared_later_are_nan_or_not_returned(num_values: int) -> None:
    store = dist.HashStore()

    def run(collectives: ThreadCollectives) -> None:
        rank = collectives.rank()
        exchange = PackedExchange("test", CPU, lambda: store)
        rows = [("other" if rank == 1 else "loss", "mean", torch.ones(num_values)), ("count", "sum", torch.tensor(1))]
        finish = None
        with contextlib.suppress(DifferentPartsError if num_values > 1 else ()):
            finish = exchange.start_deferred(collectives, "kind", parts_of(rows), lambda: f"values of rank {rank}")
        assert collectives.operations == ["all_gather"]  # the error needs no collective
        if finish is None:  # the ranks compare values that need two messages before the second
            raise KeyError
        mean, _ = finish()
        assert mean.isnan().all()
        try:
            exchange.check_deferred(waits=False)
        finally:
            exchange.check_deferred(waits=False)  # the error is raised once

    for error in on_ranks(3, run):
        if num_values > 1:
            assert isinstance(error, KeyError), error
            continue
        assert isinstance(error, DifferentPartsError), error
        assert [(each.ranks, each.description) for each in error.contributions] == [
            ([0, 2], "values of rank 0"),
            ([1], "values of rank 1"),
        ]


@pytest.mark.parametrize("other", ["long", "epoch", "evaluation"])
def test_ranks_that_compare_at_different_times_start_the_same_collectives(other: str) -> None:
    store = dist.HashStore()

    def run(collectives: ThreadCollectives) -> None:
        rank = collectives.rank()
        exchange = PackedExchange("test", CPU, lambda: store)
        describe = lambda: f"values of rank {rank}"  # noqa: E731
        parts = parts_of([("loss", "sum", torch.ones(249 if rank == 1 and other == "long" else 248))])
        try:
            if rank == 0 or other == "long":
                exchange.start_deferred(collectives, "step", parts, describe)()
                exchange.check_deferred(waits=True)
            elif other == "epoch":
                exchange.start(collectives, "epoch", parts, describe)()
            else:
                exchange.run_with_absent(collectives, "evaluation", parts, describe, list)
        finally:
            assert collectives.operations == ["all_gather"]

    for error in on_ranks(2, run):
        assert isinstance(error, DifferentPartsError), error
        assert [each.description for each in error.contributions] == ["values of rank 0", "values of rank 1"]


def test_a_rank_names_its_own_values_if_the_store_of_the_descriptions_is_lost() -> None:
    def run(collectives: ThreadCollectives) -> None:
        key = f"key{collectives.rank()}"
        exchange = PackedExchange("test", CPU, lambda: None)
        exchange.start_deferred(collectives, "kind", ((key,), ("sum",), [torch.ones(())]), lambda: key)()
        exchange.check_deferred(waits=True)

    for rank, error in enumerate(on_ranks(2, run)):
        assert isinstance(error, DifferentPartsError)
        own = [each.description for each in error.contributions]
        assert own == (["key0", None] if rank == 0 else [None, "key1"])


class Event:
    """Stands for an event of a GPU, which may be incomplete."""

    is_complete = False

    def query(self) -> bool:
        return self.is_complete

    def synchronize(self) -> None:
        self.is_complete = True


@pytest.mark.parametrize("waits", [True, False])
def test_digests_are_compared_in_order_when_they_are_complete(waits: bool) -> None:
    comparison = DeferredComparison(lambda: None)
    equal, different = Event(), Event()
    comparison._pending.append((equal, torch.tensor([7, 7]), 7))  # type: ignore[arg-type]
    comparison._pending.append((different, torch.tensor([7, 8]), 7))  # type: ignore[arg-type]
    if not waits:
        comparison.check(waits=False)
        equal.is_complete = True
        comparison.check(waits=False)
        assert len(comparison._pending) == 1
        different.is_complete = True
    with pytest.raises(DifferentPartsError) as raised:
        comparison.check(waits=waits)
    assert [[*each.ranks] for each in raised.value.contributions] == [[0], [1]]
    assert different.is_complete


def reduce_over(backend: str) -> Any:
    os.environ["RANK"] = os.environ["LOCAL_RANK"]
    dist.init_process_group(backend)
    collectives = TorchCollectives(lambda: torch.device("cpu"))
    reduced = reduce_all(collectives)
    packed_exchange.MAX_GATHERED_RANKS = 1
    parts = parts_of((key, op, torch.tensor(1.0 + dist.get_rank())) for key, op in (("a", "mean"), ("b", "max")))
    return reduced, [value.item() for value in PackedExchange("test").start(collectives, "kind", parts, list)()]


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("size", [2, 3])
def test_processes_reduce_over(backend: str, size: int) -> None:
    for reduced, many in run_ranks(reduce_over, backend, world_size=size):
        assert_reduced(reduced, size)
        assert many == [(size + 1) / 2, size]

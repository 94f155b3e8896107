"""Parts of ``exact_evaluation=True`` in one process: numbers of steps, and what a shadowed step takes back."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_strategies_ext.uneven.exact_evaluation import EvaluationFetcher
from lightning_strategies_ext.uneven.step_state import MAX_ITEMS_WITH_CONTENTS, ContentsSnapshot


class Batches:
    """Lightning's fetcher, for the DataLoaders of one rank."""

    fetched = 0
    name = "inner"

    def __init__(self, rank: int, lengths: list[int]) -> None:
        self._items = iter(
            [({"at": (rank, index, number)}, number, index) for index, n in enumerate(lengths) for number in range(n)]
        )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._items)


def steps_of(rank: int, lengths: list[list[int]], are_known: list[bool]) -> list[Any]:
    """Returns, for each step of a rank: batch, number, DataLoader, ranks with a batch, whether it is the last."""
    contributors: list[list[int]] = []
    given = [[n if known else inf for n, known in zip(of_rank, are_known, strict=True)] for of_rank in lengths]
    answers = iter(
        [each for each, length in enumerate(of_ranks) if length > number]
        for of_ranks, known in zip(zip(*lengths, strict=True), are_known, strict=True)
        if not known
        for number in range(max(of_ranks) + 1)
    )

    def ranks_with(has_batch: bool) -> list[int]:
        ranks = next(answers)
        assert has_batch == (rank in ranks)
        return ranks

    def broadcast(batch: Any, src: int) -> Any:
        return {"at": (src, None, 0)}

    batches = Batches(rank, lengths[rank])
    fetcher = EvaluationFetcher(batches, given, rank, broadcast, ranks_with, contributors.append)
    assert fetcher.name == "inner"
    steps = []
    for batch, number, index in fetcher:
        steps.append((batch["at"], number, index, contributors[-1], fetcher.done))
        del batch["at"]  # a step may change its batch
    assert next(answers, None) is None
    return steps


@st.composite
def numbers_of_batches(draw: st.DrawFn) -> tuple[list[list[int]], list[bool]]:
    """Draws the numbers of batches of each rank, by DataLoader, and whether those of each DataLoader are known."""
    num_ranks, num_loaders = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    lengths = [[draw(st.integers(0, 4)) for _ in range(num_loaders)] for _ in range(num_ranks)]
    return lengths, [draw(st.booleans()) for _ in range(num_loaders)]


@settings(derandomize=True, database=None, deadline=None)
@given(numbers_of_batches())
def test_all_ranks_run_equally_many_steps_and_each_batch_once(numbers: tuple[list[list[int]], list[bool]]) -> None:
    lengths, are_known = numbers
    num_ranks = len(lengths)
    steps = [steps_of(rank, lengths, are_known) for rank in range(num_ranks)]
    largest = [*map(max, zip(*lengths, strict=True))]
    last = max((index for index, most in enumerate(largest) if most), default=0)
    is_end_known = all(are_known[last + 1 :])  # otherwise the last step may be followed by a step of a later DataLoader
    expected = [
        (number, index) for index, of_ranks in enumerate(zip(*lengths, strict=True)) for number in range(max(of_ranks))
    ]
    for rank, of_rank in enumerate(steps):
        assert [(number, index) for _, number, index, _, _ in of_rank] == expected
        assert [done for *_, done in of_rank] == [False] * (len(expected) - 1) + [is_end_known] * bool(expected)
        own = [at for at, _, _, contributors, _ in of_rank if rank in contributors]
        assert own == [(rank, index, number) for index, n in enumerate(lengths[rank]) for number in range(n)]
        shadowed = [(at, index) for at, _, index, contributors, _ in of_rank if rank not in contributors]
        for (source, _, number), index in shadowed:
            if lengths[rank][index]:  # its last batch
                assert (source, number) == (rank, lengths[rank][index] - 1)
            else:
                assert lengths[source][index]
    for of_ranks in zip(*steps, strict=True):
        assert len({tuple(contributors) for *_, contributors, _ in of_ranks}) == 1


class Owner:
    def __init__(self) -> None:
        self.number, self.text = 1, "a"
        self.items, self.nested = [1], [[1], (2, [3])]
        self.lists: dict[str, list[int]] = defaultdict(list, a=[1])
        self.counts, self.seen, self.last = Counter("a"), {1}, deque([1, 2], maxlen=2)
        self.tensor, self.array = torch.tensor([1.0, float("nan")]), np.array([1.0])
        self.tensors = {"a": torch.ones(2)}
        self.parameter = torch.nn.Parameter(torch.ones(1))
        self.in_list = [torch.ones(1)]

    def change(self) -> None:
        self.number += 1
        self.new = True
        del self.text
        self.items.append(2)
        self.nested[0].append(2)
        self.nested[1][1].clear()
        self.lists["a"].append(2)
        self.lists["b"].append(2)
        self.counts["a"] += 1
        self.seen |= {2}
        self.last.append(3)
        self.tensor += 1
        self.array += 1
        self.tensors["a"] += 1
        self.tensors["b"] = torch.ones(1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_contents_of_attributes_are_restored_in_the_same_objects(mode: Any) -> None:
    owner, expected = Owner(), Owner()
    objects = dict(vars(owner))
    with mode():
        snapshot = ContentsSnapshot([owner])
        owner.change()
        snapshot.restore()
    assert vars(owner).keys() == vars(expected).keys()
    assert all(vars(owner)[name] is objects[name] for name in objects)
    for name in ("number", "text", "items", "nested", "lists", "counts", "seen", "last", "array"):
        assert getattr(owner, name) == getattr(expected, name), name
    assert torch.equal(owner.tensor, expected.tensor) is False  # not a number
    assert torch.equal(owner.tensor.nan_to_num(), expected.tensor.nan_to_num())
    assert owner.tensors.keys() == {"a"}
    assert torch.equal(owner.tensors["a"], torch.ones(2))


def test_parameters_tensors_in_lists_and_contents_of_large_containers_are_not_copied() -> None:
    owner = Owner()
    owner.nested = [[] for _ in range(MAX_ITEMS_WITH_CONTENTS + 1)]
    snapshot = ContentsSnapshot([owner])
    with torch.no_grad():
        owner.parameter += 1
        owner.in_list[0] += 1
    owner.nested[0].append(1)
    owner.nested.append([])
    snapshot.restore()
    assert (owner.parameter.item(), owner.in_list[0].item(), owner.nested[0]) == (2, 2, [1])
    assert len(owner.nested) == MAX_ITEMS_WITH_CONTENTS + 1


def test_unchanged_contents_are_not_written_to() -> None:
    owner = Owner()
    owner.array.flags.writeable = False
    owner.tensors["a"] = torch.ones(1).expand(2)  # cannot be written to
    ContentsSnapshot([owner]).restore()

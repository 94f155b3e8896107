"""A batch is split into parts that contain all samples, or is rejected with the path of a value and the fix.

The parts are balanced and in order, their tensors are views, and their collections have the types of the batch.
"""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import MutableMapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from lightning_strategies_ext.nested import rebuild
from lightning_strategies_ext.replication.splitting import count_samples, split, split_like


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Fields:
    x: Any
    y: Any
    epoch: int = 3


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = dataclasses.field(init=False)
    unset: Any = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "y", torch.arange(len(self.x)))


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any


class ModelOutput(OrderedDict):
    """A dict whose items are also attributes, as in HuggingFace."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Mapping(MutableMapping):
    """A mapping that stores its items in a dict, which a shallow copy shares."""

    def __init__(self, **items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Movable:
    """An object with hidden tensors, like batches of graphs."""

    def to(self, device):
        return self


class Graph:
    """An object that is not a collection."""


def rows(count, *shape):
    return torch.arange(count * int(np.prod(shape, dtype=int))).reshape(count, *shape).float()


def detections(*counts):
    return [{"boxes": rows(count, 4), "labels": torch.ones(count).long()} for count in counts]


def values(parts):
    return [part.value for part in parts]


def sizes(parts):
    return [part.num_samples for part in parts]


@pytest.mark.parametrize(
    ("num_samples", "num_parts", "expected"),
    [(8, 2, [4, 4]), (7, 2, [4, 3]), (11, 4, [3, 3, 3, 2]), (3, 8, [1, 1, 1]), (1, 2, [1]), (0, 2, [0]), (5, 1, [5])],
)
def test_parts_are_the_batch_in_order_and_balanced(num_samples, num_parts, expected):
    x, y = rows(num_samples, 5), torch.arange(num_samples)

    parts = split([x, y], num_parts)

    assert sizes(parts) == expected
    assert [len(part.value[0]) for part in parts] == expected
    assert torch.equal(torch.cat([part.value[0] for part in parts]), x)
    assert torch.equal(torch.cat([part.value[1] for part in parts]), y)


def test_tensors_in_parts_are_views_that_may_be_written_to():
    x = rows(6, 2)
    array = np.arange(6)

    for part in split((x, array), 3):
        part.value[0].add_(100)
        part.value[1][:] = 7
        assert part.value[0]._base is x

    assert torch.equal(x, rows(6, 2) + 100)
    assert array.tolist() == [7] * 6


def test_gradients_flow_through_parts_also_after_writing_to_them():
    x = rows(5, 2).requires_grad_()
    doubled = x * 2

    first, second = values(split(doubled, 2))
    first.mul_(3)
    (first.sum() + second.sum()).backward()

    assert x.grad[:, 0].tolist() == [6, 6, 6, 2, 2]


@pytest.mark.parametrize("batch", [rows(4, 2), [rows(4), ["a"] * 4], {"x": rows(4)}, ["a", "b"]])
def test_the_only_part_is_the_batch_itself(batch):
    (part,) = split(batch, 1)

    assert part.value is batch


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        pytest.param(rows(32, 5), 32, id="tensor"),
        pytest.param(np.zeros((32, 5)), 32, id="array"),
        pytest.param([rows(32, 5), rows(32)], 32, id="collated tuple"),
        pytest.param([rows(32, 5)], 32, id="list of one"),
        pytest.param([rows(2, 5), rows(2)], 2, id="as many values as samples"),
        pytest.param([rows(32, 3, 8, 8), detections(*range(32))], 32, id="detection targets"),
        pytest.param([rows(3, 3, 8, 8), detections(3, 3, 3)], 3, id="as many boxes as samples"),
        pytest.param([rows(4, 3, 8, 8), detections(3, 3, 3, 3)], 4, id="as many boxes in each"),
        pytest.param([detections(3, 3, 3, 3), rows(4, 3, 8, 8)], 4, id="a neighboring value decides"),
        pytest.param([rows(4, 5), [rows(2, 4), None, rows(7, 4), None]], 4, id="some samples have nothing"),
        pytest.param([(rows(3, 8, 8), 1)] * 4, 4, id="samples that were not collated"),
        pytest.param([(rows(3, 8, 8), torch.tensor(1))] * 4, 4, id="samples as tuples"),
        pytest.param([(rows(32, 5), rows(32)), (rows(32, 5), rows(32))], 32, id="batches of two loaders as tuples"),
        pytest.param([{"x": rows(8, 5)}, {"x": rows(8, 5)}], 8, id="batches of two loaders as dicts"),
        pytest.param([{"image": rows(3, 8, 8), "label": 1}] * 4, 4, id="samples as dicts"),
        pytest.param([[rows(3, 8, 8), "cat"]] * 4, 4, id="samples as lists"),
        pytest.param([{"x": rows(8), "names": ["a"] * 8}] * 2, 8, id="two collated batches"),
        pytest.param([rows(5, 3), rows(7, 3), rows(6, 3)], 3, id="tensors of other lengths"),
        pytest.param([torch.tensor(1.0)] * 6, 6, id="0-dim tensors"),
        pytest.param({"x": rows(8, 2), "names": ["a"] * 8}, 8, id="names"),
        pytest.param({"x": rows(8, 2), "mean": [0.1, 0.2], "lr": 0.1, "none": None}, 8, id="values for all samples"),
        pytest.param({"names": ["a"] * 8, "ids": list(range(8)), "size": (224, 224)}, 8, id="lists alone"),
        pytest.param([], 0, id="empty list"),
    ],
)
def test_the_number_of_samples_is_what_the_parts_agree_on(batch, expected):
    assert count_samples(batch) == expected

    parts = split(batch, 2)
    assert sum(sizes(parts)) == expected
    assert all(count_samples(part.value) == part.num_samples for part in parts if part.num_samples > 1)


def test_detection_targets_are_in_the_parts_of_their_images():
    images, targets = rows(4, 3, 8, 8), detections(2, 0, 3, 2)

    first, second = values(split([images, targets], 2))

    assert first[1] == targets[:2]
    assert second[1] == targets[2:]


def test_a_list_of_values_for_all_samples_is_split_value_by_value():
    first, second = values(split([rows(2, 5), rows(2)], 2))

    assert [value.shape for value in first] == [(1, 5), (1,)]
    assert second[1].tolist() == [1]


def test_samples_that_were_not_collated_stay_whole():
    batch = [(rows(3, 8, 8), label) for label in range(3)]

    assert [[sample[1] for sample in part] for part in values(split(batch, 2))] == [[0, 1], [2]]


def test_strings_as_default_collate_leaves_them():
    batch = default_collate([(torch.ones(2), "a"), (torch.ones(2), "b"), (torch.ones(2), "c")])

    assert [part[1] for part in values(split(batch, 2))] == [("a", "b"), ("c",)]


def test_values_without_rows_are_in_each_part_unchanged():
    batch = {"x": rows(4), "graph": Graph(), "scale": torch.tensor(2.0), "mean": [1, 2, 3], "size": (4, 4), "empty": {}}

    for part in values(split(batch, 2)):
        assert all(part[key] is batch[key] for key in ("graph", "scale", "mean", "empty"))
        assert part["size"] == (4, 4)


@pytest.mark.parametrize(
    "batch",
    [
        (rows(4), torch.arange(4)),
        Pair(x=rows(4), y=torch.arange(4)),
        {"x": rows(4), "y": torch.arange(4)},
        OrderedDict(y=torch.arange(4), x=rows(4)),
        defaultdict(list, x=rows(4), y=torch.arange(4)),
        UserDict(x=rows(4), y=torch.arange(4)),
        ModelOutput(x=rows(4), y=torch.arange(4)),
        Mapping(x=rows(4), y=torch.arange(4)),
        Fields(rows(4), torch.arange(4)),
        Frozen(rows(4)),
        Slotted(rows(4), torch.arange(4)),
        torch.max(rows(4, 3), dim=1),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_collections_keep_their_types_and_the_batch_stays_as_it_was(batch):
    parts = values(split(batch, 2))

    assert [type(part) for part in parts] == [type(batch)] * 2
    assert [count_samples(part) for part in parts] == [2, 2]
    assert count_samples(batch) == 4
    if isinstance(batch, MutableMapping):
        assert [list(part) for part in parts] == [list(batch)] * 2
    if hasattr(batch, "y"):
        assert [part.y.tolist() for part in parts] == [[0, 1], [2, 3]]


def test_a_rebuilt_defaultdict_has_its_factory():
    assert rebuild(defaultdict(list, a=1), [2])["missing"] == []


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((rows(4), rows(5)), r"`batch\[0\]` has 4 samples, but `batch\[1\]` has 5"),
        ([rows(4, 3, 8, 8), rows(5)], r"`batch\[0\]` has 4 samples, but `batch\[1\]` has 5"),
        (
            {"image": (rows(4), rows(4)), "y": rows(2)},
            r'`batch\["image"\]\[0\]` has 4 samples, but `batch\["y"\]` has 2',
        ),
        (Pair(rows(4), detections(1, 2, 3)), r"`batch\.x` has 4 samples, but `batch\.y` has 3"),
        (Fields(rows(4), {0: rows(3)}), r"`batch\.x` has 4 samples, but `batch\.y\[0\]` has 3"),
        ({"a": ["x"] * 3, "b": ["y"] * 4}, r'`batch\["a"\]` has 3 samples, but `batch\["b"\]` has 4'),
        (([rows(3)] * 2, [rows(4)] * 5), r"`batch\[0\]` has 3 or 2 samples, but `batch\[1\]` has 4 or 5"),
        (7, r"`batch` is of type int"),
        ("text", r"`batch` is of type str"),
        (None, r"`batch` is of type NoneType"),
        (Graph(), r"`batch` is of type Graph"),
        ({"scale": torch.tensor(1.0)}, r"`batch` is of type dict"),
        ([rows(4), Movable()], r"`batch\[1\]` is a Movable"),
        ([rows(2), pack_sequence([rows(3), rows(2)])], r"`batch\[1\]` is a PackedSequence"),
        ([pack_sequence([rows(3)]), pack_sequence([rows(3)])], r"`batch\[0\]` is a PackedSequence"),
        ({"x": torch.eye(4).to_sparse()}, r'`batch\["x"\]` is a tensor of layout torch\.sparse_coo'),
        (torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged), r"`batch` is a nested tensor"),
    ],
)
def test_a_batch_that_cannot_be_split_is_rejected_with_the_path_and_the_fix(batch, message):
    fix = "Give the strategy a `scatter` function that splits it: `DataParallelStrategy(scatter=...)`."
    for num_parts in (1, 2):
        with pytest.raises(ValueError, match=message) as caught:
            split(batch, num_parts)
        assert "cannot be split" in str(caught.value)
        assert fix in str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_strided_layout_are_refused():
    with pytest.raises(ValueError, match=r"`batch\[0\]` is a nested tensor.*scatter=\.\.\."):
        split((torch.nested.nested_tensor([rows(2), rows(3)]), rows(2)), 2)


def test_sparse_tensors_of_single_samples_are_entries_like_others():
    adjacency = [torch.eye(size).to_sparse() for size in (3, 4, 5)]

    assert [len(part[1]) for part in values(split([rows(3), adjacency], 2))] == [2, 1]


def test_other_arguments_are_split_as_the_first_was():
    arguments = {
        "mask": rows(5, 2),
        "names": list("abcde"),
        "table": rows(7),
        "more": [1, 2],
        "lists": [rows(5)],
        "k": 1,
    }

    parts = split_like(arguments, [2, 3], "kwargs")

    assert [part["mask"].shape for part in parts] == [(2, 2), (3, 2)]
    assert [part["names"] for part in parts] == [["a", "b"], ["c", "d", "e"]]
    assert [part["lists"][0].tolist() for part in parts] == [[0, 1], [2, 3, 4]]
    assert all(part["table"] is arguments["table"] and part["more"] is arguments["more"] for part in parts)


@pytest.mark.parametrize(
    "value", [None, 3, "text", [1, 2], rows(7), torch.tensor(1), torch.eye(3).to_sparse()], ids=str
)
def test_other_arguments_of_other_sizes_are_given_to_each_part(value):
    assert all(part is value for part in split_like(value, [2, 3], "args[1]"))


@pytest.mark.parametrize("value", [pack_sequence([rows(2)]), torch.eye(5).to_sparse()], ids=["packed", "sparse"])
def test_other_arguments_that_cannot_be_split_are_refused(value):
    with pytest.raises(ValueError, match=r"`args\[1\]\[0\]` is a .*cannot be split.*scatter=\.\.\."):
        split_like([value], [2, 3], "args[1]")


def test_the_number_of_parts_must_be_positive():
    with pytest.raises(ValueError, match=r"`num_parts` must be at least 1, not 0"):
        split(rows(3), 0)

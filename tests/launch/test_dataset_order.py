"""The merged predictions of several ranks equal those of one process.

These tests start no process: a rank is represented by its keys and by a generator of predictions.
"""

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_strategies_ext.launch.tasks.dataset_order import KeyedOutputs, in_dataset_order

Predict = Callable[[list[int]], Any]


class Scores(NamedTuple):
    logits: torch.Tensor
    names: list[str]


@dataclass(frozen=True)
class Detection:
    scores: torch.Tensor
    boxes: list[torch.Tensor]
    model: str
    final: bool


def logits(keys: list[int]) -> torch.Tensor:
    return torch.tensor(keys).float().unsqueeze(1) * torch.tensor([1.0, 10.0, 100.0])


def names(keys: list[int]) -> list[str]:
    return [f"sample {key}" for key in keys]


def boxes(keys: list[int]) -> list[torch.Tensor]:
    """Returns 5 to 7 boxes per sample, as a detector does; no batch here has as many samples."""
    return [torch.full((5 + key % 3, 4), float(key)) for key in keys]


PREDICT_STEPS: dict[str, Predict] = {
    "tensor": logits,
    "one number per sample": lambda keys: torch.tensor(keys),
    "bfloat16": lambda keys: logits(keys).bfloat16(),
    "float8": lambda keys: torch.tensor(keys).float().to(torch.float8_e4m3fn),
    "uint16": lambda keys: torch.tensor(keys).to(torch.uint16),
    "bool": lambda keys: torch.tensor(keys) % 3 == 0,
    "with gradient": lambda keys: logits(keys).requires_grad_() * 2,
    "not contiguous": lambda keys: logits(keys).t().contiguous().t(),
    "ndarray": lambda keys: logits(keys).numpy().astype(np.float16),
    "ndarray of str": lambda keys: np.array(names(keys), dtype="<U12"),
    "masked array": lambda keys: np.ma.array(keys, mask=[key % 2 for key in keys]),
    "dict": lambda keys: {"logits": logits(keys), "key": torch.tensor(keys)},
    "OrderedDict": lambda keys: OrderedDict(b=logits(keys), a=torch.tensor(keys)),
    "defaultdict": lambda keys: defaultdict(list, a=torch.tensor(keys)),
    "tuple": lambda keys: (logits(keys), np.array(keys)),
    "namedtuple": lambda keys: Scores(logits(keys), names(keys)),
    "torch.return_types": lambda keys: torch.max(logits(keys), dim=1),
    "nested": lambda keys: {"a": (logits(keys), {"b": None, "c": names(keys)}), "d": boxes(keys), "e": ()},
    "list of str": names,
    "list of dicts": lambda keys: [{"box": box, "key": box.numpy()} for box in boxes(keys)],
    "list of tensors per sample": boxes,
    "list of numbers": lambda keys: list(keys),
    "list of batched tensors": lambda keys: [logits(keys), torch.tensor(keys)],
    "None": lambda keys: None,
    "dataclass": lambda keys: Detection(logits(keys), boxes(keys), "detector", final=True),
    "strings and tensors": lambda keys: {"kind": "logits", "values": logits(keys), "flags": (True, ("a",) * 7)},
    "empty dict": lambda keys: {},
}


def chunks(keys: list[int], batch_size: int) -> list[list[int]]:
    return [keys[start : start + batch_size] for start in range(0, len(keys), batch_size)]


def one_process(predict: Predict, keys: list[int], batch_size: int) -> list[Any]:
    return [predict(batch) for batch in chunks(keys, batch_size)]


def rank_of(predict: Predict, keys: list[int], batch_size: int) -> KeyedOutputs:
    batches = chunks(keys, batch_size)
    return KeyedOutputs(batches, (predict(batch) for batch in batches))


def strided(predict: Predict, num_samples: int, world_size: int, batch_size: int) -> list[KeyedOutputs]:
    """Returns ranks with the keys of a distributed sampler that repeats no sample: their lengths may differ."""
    shards = [list(range(rank, num_samples, world_size)) for rank in range(world_size)]
    return [rank_of(predict, shard, batch_size) for shard in shards]


def whole(keys: list[int]) -> dict[str, Any]:
    """Returns an output that cannot be split: a mean over the batch, with its keys for comparisons."""
    return {"mean": torch.tensor(keys).float().mean(), "of": tuple(keys)}


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert not actual.requires_grad
        assert actual.tolist() == expected.tolist()
    elif isinstance(expected, np.ndarray):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tolist() == expected.tolist()
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_same(list(actual.values()), list(expected.values()))
    elif is_dataclass(expected):
        for field in fields(expected):
            assert_same(getattr(actual, field.name), getattr(expected, field.name))
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_same(actual_item, expected_item)
    else:
        assert actual == expected


class TestOneProcess:
    """Results have the order and the batches of one process."""

    @pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5])
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4])
    @pytest.mark.parametrize("num_samples", [1, 3, 8, 17, 24])
    def test_every_size_gives_the_order_of_one_process(self, num_samples, world_size, batch_size):
        ranks = strided(logits, num_samples, world_size, batch_size)
        expected = one_process(logits, list(range(num_samples)), batch_size)
        assert_same(in_dataset_order(ranks, batch_size), expected)

    @pytest.mark.parametrize("predict", PREDICT_STEPS.values(), ids=PREDICT_STEPS)
    @pytest.mark.parametrize(("num_samples", "world_size", "batch_size"), [(17, 3, 4), (17, 2, 1), (3, 4, 3)])
    def test_every_kind_of_output_gives_the_order_of_one_process(self, predict, num_samples, world_size, batch_size):
        ranks = strided(predict, num_samples, world_size, batch_size)
        expected = one_process(predict, list(range(num_samples)), batch_size)
        assert_same(in_dataset_order(ranks, batch_size), expected)

    def test_a_defaultdict_keeps_its_factory(self):
        (batch,) = in_dataset_order(strided(PREDICT_STEPS["defaultdict"], 2, 2, 1), 2)
        assert batch.default_factory is list

    def test_keys_in_any_order(self):
        keys = random.Random(1).sample(range(100), 23)
        ranks = [rank_of(logits, shard, 4) for shard in (keys[:9], keys[9:11], keys[11:])]
        assert_same(in_dataset_order(ranks, 5), one_process(logits, sorted(keys), 5))

    def test_ranks_without_batches(self):
        ranks = [KeyedOutputs([], iter(())), rank_of(logits, [0, 1, 2], 2), KeyedOutputs([], iter(()))]
        assert_same(in_dataset_order(ranks, 2), one_process(logits, [0, 1, 2], 2))
        assert in_dataset_order([], 2) == []
        assert in_dataset_order([KeyedOutputs([], iter(()))], 2) == []

    def test_random_cases(self):
        choose = random.Random(20)
        steps = list(PREDICT_STEPS.values())
        for _ in range(150):
            predict, batch_size = choose.choice(steps), choose.randint(1, 6)
            keys = [choose.randrange(30) for _ in range(choose.randint(1, 40))]
            cuts = sorted(choose.randint(0, len(keys)) for _ in range(choose.randint(0, 4)))
            shards = [keys[start:end] for start, end in zip([0, *cuts], [*cuts, len(keys)], strict=True)]
            ranks = [rank_of(predict, shard, batch_size) for shard in shards]
            expected = one_process(predict, sorted(set(keys)), batch_size)
            assert_same(in_dataset_order(ranks, batch_size), expected)


class TestDuplicates:
    """Duplicates of a key are dropped, whether a sampler has padded its indices or all ranks have all samples."""

    @pytest.mark.parametrize("num_samples", [1, 5, 7, 9])
    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_padded_shards(self, num_samples, world_size):
        padded_size = -(-num_samples // world_size) * world_size
        shards = [[key % num_samples for key in range(rank, padded_size, world_size)] for rank in range(world_size)]
        ranks = [rank_of(logits, shard, 2) for shard in shards]
        assert_same(in_dataset_order(ranks, 2), one_process(logits, list(range(num_samples)), 2))

    def test_the_first_output_of_the_lowest_rank_is_kept(self):
        def by(source: str) -> Predict:
            positions = iter(range(100))
            return lambda keys: [f"{key} by {source}.{next(positions)}" for key in keys]

        ranks = [rank_of(by("a"), [4, 1, 1, 4], 3), rank_of(by("b"), [0, 1, 2, 3, 4, 2], 3)]
        expected = ["0 by b.0", "1 by a.1", "2 by b.2", "3 by b.3", "4 by a.0"]
        assert in_dataset_order(ranks, 5) == [expected]

    def test_every_iterator_is_read_to_its_end(self):
        ends = []

        def outputs(rank: int) -> Iterator[Any]:
            yield from (logits([key]) for key in range(4))
            ends.append(rank)

        ranks = [KeyedOutputs([[key] for key in range(4)], outputs(rank)) for rank in range(3)]
        assert_same(in_dataset_order(ranks, 4), [logits([0, 1, 2, 3])])
        assert ends == [0, 1, 2]


class TestSeparateBatches:
    """Samples that do not fit into one batch stay in separate batches."""

    def test_rows_of_different_shapes(self):
        def padded(keys: list[int]) -> torch.Tensor:
            return torch.tensor(keys).unsqueeze(1).repeat(1, 2 + keys[0] // 4 + keys[0] // 6)

        def expected(*batches: list[int]) -> list[torch.Tensor]:
            return [padded(keys) for keys in batches]

        for batch_size, batches in {
            4: ([0, 1, 2, 3], [4, 5], [6, 7]),
            3: ([0, 1, 2], [3], [4, 5], [6, 7]),
            8: ([0, 1, 2, 3], [4, 5], [6, 7]),
        }.items():
            ranks = [rank_of(padded, [0, 2, 4, 5], 2), rank_of(padded, [1, 3, 6, 7], 2)]
            assert_same(in_dataset_order(ranks, batch_size), expected(*batches))

    def test_different_dtypes_types_or_keys(self):
        kinds: list[Predict] = [
            torch.tensor,
            lambda keys: torch.tensor(keys).float(),
            np.array,
            lambda keys: np.array(keys, dtype=np.float32),
            lambda keys: np.ma.array(keys, dtype=np.float32),
            lambda keys: {"a": torch.tensor(keys)},
            lambda keys: OrderedDict(a=torch.tensor(keys)),
            lambda keys: {"b": torch.tensor(keys)},
            lambda keys: (torch.tensor(keys),),
            lambda keys: [torch.tensor(keys)],
            lambda keys: None,
        ]

        def various(keys: list[int]) -> Any:
            return kinds[keys[0] // 2](keys)

        keys = list(range(2 * len(kinds)))
        for batch_size in (2, 4, len(keys)):
            assert_same(in_dataset_order([rank_of(various, keys, 2)], batch_size), one_process(various, keys, 2))

    def test_alternating_forms_keep_the_order(self):
        ranks = [rank_of(logits, [0, 2, 4], 3), rank_of(names, [1, 3, 5], 3)]
        expected = [logits([0]), names([1]), logits([2]), names([3]), logits([4]), names([5])]
        assert_same(in_dataset_order(ranks, 3), expected)


class TestWholeOutputs:
    """An output that cannot be split stays whole."""

    @pytest.mark.parametrize(
        "predict",
        [
            lambda keys: float(keys[0]),
            lambda keys: torch.tensor(keys[0]),
            lambda keys: torch.zeros(len(keys) + 1, keys[0]),
            lambda keys: f"written to {keys[0]}",
            lambda keys: {"file": f"{keys[0]}", "is_written": True, "error": None},
            lambda keys: {"loss": torch.tensor(0.5), "logits": logits(keys)},
            lambda keys: [logits(keys), float(keys[0]), "three entries for two samples"],
            lambda keys: {keys[0]},
            lambda keys: np.array(keys[0]),
            lambda keys: (logits(keys), [torch.zeros(3), torch.zeros(3), torch.zeros(3)]),
        ],
    )
    def test_order_by_smallest_key(self, predict):
        ranks = [rank_of(predict, [0, 8, 2, 3], 2), rank_of(predict, [7, 1, 9, 6], 2)]
        expected = [predict(keys) for keys in ([0, 8], [7, 1], [2, 3], [9, 6])]
        assert_same(in_dataset_order(ranks, 2), expected)

    def test_sparse_tensors(self):
        ranks = [rank_of(lambda keys: logits(keys).to_sparse(), keys, 2) for keys in ([4, 2], [3, 1])]
        result = in_dataset_order(ranks, 2)
        assert all(batch.is_sparse for batch in result)
        assert_same([batch.to_dense() for batch in result], [logits([3, 1]), logits([4, 2])])

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_nested_tensors(self, layout):
        def nest(keys: list[int]) -> torch.Tensor:
            return torch.nested.as_nested_tensor(boxes(keys), layout=layout)

        result = in_dataset_order([rank_of(nest, [4, 2], 2), rank_of(nest, [3, 1], 2)], 2)
        assert [batch.is_nested and batch.layout for batch in result] == [layout, layout]
        assert_same([list(batch.unbind()) for batch in result], [boxes([3, 1]), boxes([4, 2])])

    def test_an_output_without_new_samples_is_dropped(self):
        ranks = [rank_of(whole, [0, 1, 2, 3], 2), rank_of(whole, [3, 0, 1, 4], 2)]
        # [1, 4] of the second rank has one new sample, 4; [3, 0] has none.
        assert_same(in_dataset_order(ranks, 2), [whole([0, 1]), whole([2, 3]), whole([1, 4])])

    def test_among_outputs_that_can_be_split(self):
        ranks = [rank_of(logits, [0, 2, 4, 6, 8], 2), rank_of(whole, [1, 3, 5, 7], 2)]
        expected = [logits([0]), whole([1, 3]), logits([2]), logits([4]), whole([5, 7]), logits([6]), logits([8])]
        assert_same(in_dataset_order(ranks, 4), expected)

    def test_an_output_that_is_read_before_it_is_needed(self):
        """The first output of the rank is needed last."""
        ranks = [KeyedOutputs([[8, 9], [0, 1]], iter([whole([8, 9]), logits([0, 1])])), rank_of(logits, [2, 3], 2)]
        assert_same(in_dataset_order(ranks, 3), [logits([0, 1, 2]), logits([3]), whole([8, 9])])


class TestLists:
    """A list has one entry per sample, or batched values. Sometimes, only other batches resolve the ambiguity."""

    def test_last_batch_that_looks_like_a_collection(self):
        """A detector whose last batch is one sample with one box."""

        def detect(keys: list[int]) -> list[torch.Tensor]:
            return [torch.full((1 if key > 7 else 2 + key, 4), float(key)) for key in keys]

        ranks = strided(detect, 10, 2, 4)
        assert_same(in_dataset_order(ranks, 4), one_process(detect, list(range(10)), 4))

    def test_batch_of_one(self):
        """No batches are merged, so the meaning of the list does not matter."""

        def detect(keys: list[int]) -> list[torch.Tensor]:
            return [torch.full((1 + key % 2, 4), float(key)) for key in keys]

        assert_same(in_dataset_order(strided(detect, 5, 2, 1), 1), one_process(detect, list(range(5)), 1))

    def test_as_many_batched_values_as_samples(self):
        """The lists are ambiguous, so the batches are not changed."""
        two = PREDICT_STEPS["list of batched tensors"]
        assert_same(in_dataset_order(strided(two, 4, 2, 2), 2), [two([0, 2]), two([1, 3])])

    def test_one_batched_tensor(self):
        def wrapped(keys: list[int]) -> list[torch.Tensor]:
            return [logits(keys)]

        assert_same(in_dataset_order(strided(wrapped, 17, 3, 4), 4), one_process(wrapped, list(range(17)), 4))

    def test_lists_of_both_kinds(self):
        """The third list has batched values, so the lists before it have, too; the last has one entry per sample."""
        outputs = [
            *one_process(PREDICT_STEPS["list of batched tensors"], [0, 1, 2, 3], 2),
            [logits([4, 5])],
            ["6", "7"],
        ]
        keys = chunks(list(range(8)), 2)
        assert_same(in_dataset_order([KeyedOutputs(keys, iter(outputs))], 2), outputs)

    def test_ambiguous_lists_before_a_clear_one(self):
        """The first lists are ambiguous and stay whole; a later list determines the meaning of the lists after it."""

        def detect(keys: list[int]) -> list[torch.Tensor]:
            return [torch.full((2 if key < 4 else 3, 4), float(key)) for key in keys]

        expected = [detect([0, 2]), detect([1, 3]), detect([4, 5]), detect([6, 7])]
        assert_same(in_dataset_order(strided(detect, 8, 2, 2), 2), expected)


class TestBadInput:
    def test_iterator_ends_early(self):
        ranks = [rank_of(logits, [0, 2], 1), KeyedOutputs([[1], [3]], iter([logits([1])]))]
        with pytest.raises(ValueError, match=r"Rank 1 has keys for 1 more batch\(es\) than it has outputs"):
            in_dataset_order(ranks, 2)

    def test_iterator_ends_early_among_duplicates(self):
        ranks = [rank_of(logits, [0, 1], 1), KeyedOutputs([[0], [1]], iter([logits([0])]))]
        with pytest.raises(ValueError, match="Rank 1 has keys for 1 more"):
            in_dataset_order(ranks, 2)

    def test_more_outputs_than_keys(self):
        with pytest.raises(ValueError, match="Rank 0 has more outputs than lists of keys"):
            in_dataset_order([KeyedOutputs([[0]], iter([logits([0]), logits([1])]))], 2)

    def test_batch_size(self):
        with pytest.raises(ValueError, match="must be at least 1, not 0"):
            in_dataset_order([], 0)

"""The outputs of replicas are gathered into the output of one step with the whole batch, with the same gradients.

Structures and types are kept. Outputs that do not match are rejected, and the message names the value and the fix.
"""

import dataclasses
import math
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence

from lightning_strategies_ext.replication.gathering import gather, weighted_mean
from lightning_strategies_ext.replication.splitting import split

CPU = torch.device("cpu")
META = torch.device("meta")  # shows whether tensors were moved, without an accelerator


class Scores(NamedTuple):
    logits: Any
    loss: Any


@dataclasses.dataclass(frozen=True)
class Output:
    logits: Any
    loss: Any
    kind: str = "output"


def logits(x):
    return x * torch.tensor([1.0, 10.0, 100.0])


def loss(x):
    return logits(x).mean()


def boxes(x):
    return [torch.full((int(value) % 3 + 5, 4), float(value)) for value in x]


STEPS = {
    "tensor": logits,
    "one number per sample": lambda x: x[:, 0],
    "loss": loss,
    "loss as float": lambda x: loss(x).item(),
    "loss as numpy's float": lambda x: np.float64(loss(x).item()),
    "loss as 0-dim array": lambda x: np.array(loss(x).item()),
    "complex": lambda x: torch.complex(loss(x), loss(x)),
    "ndarray": lambda x: logits(x).numpy(),
    "masked array": lambda x: np.ma.array(x[:, 0].numpy(), mask=x[:, 0].numpy() % 2 == 0),
    "dict": lambda x: {"loss": loss(x), "logits": logits(x)},
    "OrderedDict": lambda x: OrderedDict(logits=logits(x), loss=loss(x)),
    "defaultdict": lambda x: defaultdict(list, loss=loss(x)),
    "UserDict": lambda x: UserDict(loss=loss(x)),
    "tuple": lambda x: (logits(x), loss(x)),
    "namedtuple": lambda x: Scores(logits(x), loss(x)),
    "dataclass": lambda x: Output(logits(x), loss(x)),
    "torch.return_types": lambda x: torch.max(logits(x), dim=1),
    "predictions and loss": lambda x: [logits(x), loss(x)],
    "predictions and names": lambda x: [logits(x), [f"sample {value}" for value in x], "train", None],
    "predictions and boxes": lambda x: [logits(x), boxes(x)],
    "predictions in dicts": lambda x: [{"logits": logits(x), "loss": loss(x)}, (logits(x),), {"loss": loss(x)}],
    "list of strings": lambda x: [f"sample {value}" for value in x],
    "list of numbers": lambda x: x[:, 0].tolist(),
    "list of 0-dim tensors": lambda x: list(x[:, 0]),
    "list of tensors": boxes,
    "list of dicts": lambda x: [{"boxes": box, "name": "a", "count": len(box)} for box in boxes(x)],
    "string": lambda x: "train",
    "flag": lambda x: True,
    "dtype": lambda x: x.dtype,
    "None": lambda x: None,
    "empty list": lambda x: [],
    "empty dict": lambda x: {},
    "nested": lambda x: {"a": (logits(x), {"b": None, "c": boxes(x)}), "d": [logits(x), {"e": loss(x)}]},
}


def samples(count):
    return torch.arange(count).float().unsqueeze(1)


def of_parts(step, count, num_parts, device=CPU):
    parts = split(samples(count), num_parts)
    return gather([step(part.value) for part in parts], [part.num_samples for part in parts], device, "output")


def assert_equal(value, expected):
    assert type(value) is type(expected) or isinstance(value, float)
    if isinstance(expected, torch.Tensor):
        assert value.dtype == expected.dtype
        torch.testing.assert_close(value, expected)
    elif isinstance(expected, np.ma.MaskedArray):
        assert value.tolist() == expected.tolist()
    elif isinstance(expected, np.ndarray):
        np.testing.assert_allclose(value, expected)
    elif isinstance(expected, dict | UserDict):
        assert list(value) == list(expected)
        for key in expected:
            assert_equal(value[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(value) == len(expected)
        for part, expected_part in zip(value, expected, strict=True):
            assert_equal(part, expected_part)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_equal(getattr(value, field.name), getattr(expected, field.name))
    elif isinstance(expected, float):
        assert value == pytest.approx(expected)
    else:
        assert value == expected


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("count", [4, 5, 6, 11])
@pytest.mark.parametrize("step", STEPS)
def test_outputs_of_parts_are_gathered_to_the_output_for_the_whole_batch(step, count, num_parts):
    whole = STEPS[step](samples(count))
    if isinstance(whole, np.ndarray) and whole.ndim == 0:
        whole = whole.item()

    assert_equal(of_parts(STEPS[step], count, num_parts), whole)


@pytest.mark.parametrize(("count", "num_parts"), [(7, 2), (8, 3), (5, 5)])
def test_the_gradient_through_parts_of_different_sizes_is_that_of_the_whole_batch(count, num_parts):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).double()
    x, y = torch.randn(count, 4).double(), torch.randn(count, 3).double()

    def step(batch):
        output = model(batch[0])
        return {"loss": torch.nn.functional.mse_loss(output, batch[1]), "output": output}

    def gradient(result):
        (weights,) = torch.autograd.grad(result["loss"] + result["output"].pow(2).sum(), [model.weight])
        return weights

    parts = split([x, y], num_parts)
    sizes = [part.num_samples for part in parts]
    gathered = gather([step(part.value) for part in parts], sizes, CPU, "output")

    torch.testing.assert_close(gradient(gathered), gradient(step([x, y])))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_a_mean_keeps_its_dtype(dtype):
    result = gather([torch.tensor(1, dtype=dtype), torch.tensor(4, dtype=dtype)], [2, 1], CPU, "output")

    assert result.dtype == dtype
    assert result.item() == pytest.approx(2)


def test_a_mean_of_one_object_is_that_object():
    weight = torch.nn.Parameter(torch.tensor(0.1))

    assert gather([weight, weight, weight], [3, 2, 2], CPU, "output") is weight


@pytest.mark.parametrize("value", [0.1, math.inf, -1e308, 1e308, 0.1j])
def test_a_mean_of_equal_numbers_is_exactly_that_number(value):
    result = gather([value] * 3, [3, 2, 2], CPU, "output")

    assert result == value
    assert type(result) is type(value)


LABELS = torch.tensor([0, 2, 2, 1, 1, 2, 0])
LOSSES = {
    "ignored entries": lambda x, y: functional.cross_entropy(x, y, ignore_index=2),
    "a part of ignored entries": lambda x, y: functional.cross_entropy(x, torch.where(x[:, 0] < 3, -100, y)),
    "class weights": lambda x, y: functional.cross_entropy(x, y, weight=torch.tensor([1.0, 10.0, 2.0])),
    "pixels": lambda x, y: functional.cross_entropy(x.unsqueeze(2), y.unsqueeze(1), ignore_index=1),
    "a masked mean": lambda x, y: x.square()[y > 0].mean(),
    "a masked sum and its count": lambda x, y: (x.square() * (y > 0)[:, None]).sum() / (y > 0).sum(),
    "a sum and a number": lambda x, y: x.square().sum() / len(x),
    "a sum": lambda x, y: functional.cross_entropy(x, y, reduction="sum"),
    "a sum of squares": lambda x, y: functional.mse_loss(x, torch.ones_like(x), reduction="sum"),
    "squares": lambda x, y: functional.mse_loss(x, torch.ones_like(x)),
    "a mean of two": lambda x, y: torch.stack([x.mean(), x.square().mean()]).mean(),
    "a mean of two by hand": lambda x, y: torch.stack([x.mean(), x.square().mean()]).sum() / 2,
    "two terms": lambda x, y: x.mean() + 0.1 * x.square().mean(),
    "in half precision": lambda x, y: functional.cross_entropy(x.bfloat16(), y, ignore_index=2),
}


@pytest.mark.parametrize("num_parts", [2, 3, 7])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_and_its_gradient_are_those_of_the_whole_batch(loss, num_parts):
    rows = (samples(7) * torch.tensor([1.0, 0.5, -0.1])).requires_grad_()
    parts = split((rows, LABELS), num_parts)
    total = gather([loss(*part.value) for part in parts], [part.num_samples for part in parts], CPU, "loss")
    expected = loss(rows, LABELS)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if expected.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(total, expected, **tolerance)
    gradients = [torch.autograd.grad(value, rows)[0] for value in (total, expected)]
    torch.testing.assert_close(*gradients, **tolerance)


def test_weighted_mean_counts_samples():
    assert weighted_mean([3.5, 5.0], [2, 1], CPU) == 4  # exact, because it is the mean of all samples
    assert weighted_mean([torch.tensor(1.0), torch.tensor(4.0)], [2, 1], CPU).item() == pytest.approx(2)


def test_weighted_mean_of_no_samples_is_the_plain_mean():
    assert weighted_mean([1.0, 4.0], [0, 0], CPU) == pytest.approx(2.5)


def test_a_replica_without_samples_does_not_count():
    assert weighted_mean([torch.tensor(1.0), torch.tensor(math.nan)], [2, 0], CPU).item() == 1


def test_nan_is_not_lost():
    assert math.isnan(gather([math.nan, 1.0], [1, 1], CPU, "output"))
    assert gather([torch.tensor(math.nan), torch.tensor(1.0)], [1, 1], CPU, "output").isnan()


def test_a_loss_may_be_a_number_in_a_replica_without_data_for_the_loss():
    weight = torch.tensor(3.0, requires_grad=True)

    result = gather([weight * 2, 0.0], [1, 1], CPU, "output")
    result.backward()

    assert result.item() == 3
    assert weight.grad.item() == 1
    assert gather([0, 0.5], [1, 1], CPU, "output") == 0.25


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3, 4], torch.tensor([3, 4])),
        ([np.int32(3), np.int32(4)], torch.tensor([3, 4])),
        ([torch.tensor(3), torch.tensor(4)], torch.tensor([3, 4])),
        ([torch.tensor(3).int()], torch.tensor([3]).int()),
        ([3], torch.tensor([3])),
        ([True, False], torch.tensor([True, False])),
        ([np.bool_(True), np.bool_(False)], torch.tensor([True, False])),
        ([torch.tensor(True), torch.tensor(False)], torch.tensor([True, False])),
        ([np.array(3), np.array(4)], torch.tensor([3, 4])),
    ],
)
def test_integers_become_one_entry_per_replica(values, expected):
    result = gather(values, [5, 5][: len(values)], CPU, "output")

    assert result.dtype == expected.dtype
    assert result.tolist() == expected.tolist()


def test_everything_is_on_the_device():
    def step(x):
        return {"loss": loss(x), "output": (logits(x), [logits(x), loss(x)]), "boxes": boxes(x), "count": len(x)}

    for num_parts in (1, 2):
        result = of_parts(step, 5, num_parts, META)
        tensors = [result["loss"], result["output"][0], *result["output"][1], *result["boxes"], result["count"]]
        assert [tensor.device for tensor in tensors] == [META] * len(tensors)


def test_entries_that_need_no_move_are_the_objects_that_were_returned():
    entries = [{"boxes": torch.ones(5, 4), "name": ["a"]}, Scores(torch.ones(2), 1), None]

    result = gather([entries[:2], entries[2:]], [2, 1], CPU, "output")

    assert all(value is entry for value, entry in zip(result, entries, strict=True))


@pytest.mark.parametrize(
    ("values", "sizes", "expected"),
    [
        pytest.param([["a", "b"], ["c", "d"]], [2, 2], ["a", "b", "c", "d"], id="one per sample"),
        pytest.param([["a"], ["b", "c"]], [4, 4], ["a", "b", "c"], id="of other lengths"),
        pytest.param([["a", "b"], ["a", "c"]], [4, 4], ["a", ["b", "c"]], id="of one length"),
        pytest.param([[], []], [4, 4], [], id="empty"),
        pytest.param([[], ["a"]], [4, 4], ["a"], id="one empty"),
        pytest.param([[], []], [0, 0], [], id="no samples"),
        pytest.param([[[0.0], [1.0]], [[2.0], [3.0]]], [2, 2], [[0.0], [1.0], [2.0], [3.0]], id="lists of numbers"),
        pytest.param([[1.0, 2.0], [3.0, 4.0]], [3, 1], [1.5, 2.5], id="metrics"),
    ],
)
def test_lists_are_concatenated_where_they_have_one_entry_per_sample(values, sizes, expected):
    assert gather(values, sizes, CPU, "output") == expected


def test_a_list_of_as_many_values_as_samples_is_gathered_value_by_value():
    values = [[torch.ones(2, 3), torch.tensor(1.0)], [torch.ones(2, 3), torch.tensor(3.0)]]

    output, mean = gather(values, [2, 2], CPU, "output")

    assert output.shape == (4, 3)
    assert mean.item() == 2


def test_a_list_of_one_tensor_of_any_length_per_sample_is_concatenated():
    values = [[torch.ones(2, 4), torch.ones(5, 4)], [torch.ones(2, 4), torch.ones(2, 4)]]

    assert [len(value) for value in gather(values, [2, 2], CPU, "output")] == [2, 5, 2, 2]


class Incomparable:
    def __eq__(self, other):
        raise RuntimeError("no")

    __hash__ = None


def test_other_objects_are_one_if_equal_and_else_a_list():
    one, other = Incomparable(), Incomparable()

    assert gather(["a", "a"], [1, 1], CPU, "output") == "a"
    assert gather(["a", "b"], [1, 1], CPU, "output") == ["a", "b"]
    assert gather([one, one], [1, 1], CPU, "output") is one
    assert gather([one, other], [1, 1], CPU, "output")[1] is other
    assert gather(["a", 1], [1, 1], CPU, "output") == ["a", 1]


def test_keys_may_be_in_another_order():
    result = gather([{"a": 1.0, "b": 2.0}, {"b": 4.0, "a": 3.0}], [1, 1], CPU, "output")

    assert result == {"a": 2.0, "b": 3.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([torch.ones(1), None], r"`out` .* is None in replica 1, but not in replica 0\. Use a value in all replicas"),
        ([{"loss": None}, {"loss": 1.0}], r'`out\["loss"\]` .* is None in replica 0, but not in replica 1'),
        (
            [(torch.ones(1, 3),), (torch.ones(1, 4),)],
            r"`out\[0\]` .* shape is \(1, 4\) in replica 1, but \(1, 3\) in replica 0.* Pad to one length, or",
        ),
        ([torch.ones(1, 3), torch.ones(1)], r"`out` .* shape is \(1,\) in replica 1, but \(1, 3\) in replica 0"),
        ([torch.tensor(1.0), torch.ones(1)], r"`out` .* shape is \(1,\) in replica 1, but \(\) in replica 0"),
        ([np.ones((1, 3)), np.ones((1, 4))], r"`out` .* shape is \(1, 4\) in replica 1, but \(1, 3\) in replica 0"),
        ([torch.ones(1), "a"], r"`out` .* is of type str in replica 1, but of type Tensor in replica 0"),
        ([torch.ones(1), np.ones(1)], r"`out` .* type ndarray in replica 1, but of type Tensor .* Use the same type"),
        ([np.ones(1), [1]], r"`out` .* of type list in replica 1, but of type ndarray in replica 0"),
        ([(1,), [1]], r"`out` .* of type list in replica 1, but of type tuple in replica 0"),
        ([1, {}], r"`out` .* of type dict in replica 1, but of type int in replica 0"),
        (
            [Scores({"a": 1}, 1), Scores({"b": 1}, 1)],
            r'`out\.logits` .* keys are \["b"\] in replica 1, but \["a"\] in replica 0',
        ),
        (
            [(1, 2), (1,)],
            r"`out` .* its parts are \[0\] in replica 1, but \[0\], \[1\] in replica 0\. Use the same parts for",
        ),
        ([{"a": 1}, {}], r'`out` .* its keys are none in replica 1, but \["a"\] in replica 0\. Use the same keys for'),
        ([pack_sequence([torch.ones(2)])] * 2, r"`out` is a PackedSequence, .* Return the padded tensor"),
        (
            [torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)] * 2,
            r"`out` is a nested tensor.*Return a list",
        ),
    ],
)
def test_values_that_do_not_match_are_rejected_with_their_name_and_the_fix(values, message):
    with pytest.raises(ValueError, match=message):
        gather(values, [1, 1], CPU, "out")

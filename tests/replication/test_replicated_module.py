"""Calls of a module's replicas give the results of one call with the whole batch, or raise an error."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError, Metric, SumMetric

from lightning_strategies_ext.replication.metrics import Identity
from lightning_strategies_ext.replication.module import ReplicatedModule

BATCH = torch.arange(4.0).reshape(4, 1)


class Calling(nn.Module):
    """A module whose forward pass calls a function with the module and the rows."""

    def __init__(self, function: Callable, **attributes):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)

    training_step = forward


@pytest.fixture
def replicate():
    """Returns a function that replicates a module until the end of the test."""
    created = []

    def replicate(module, num_replicas=2, **kwargs):
        created.append(ReplicatedModule(module, [torch.device("cpu")] * num_replicas, **kwargs))
        return created[-1]

    yield replicate
    for replicated in created:
        replicated.close()


each_order = pytest.mark.parametrize("sequential", [True, False])


@each_order
def test_replicas_that_use_different_metrics_of_one_type_are_refused(replicate, sequential):
    def function(module, rows):
        return (module.one if rows[0] == 0 else module.two)(rows.flatten())

    module = Calling(function, one=MeanMetric(), two=MeanMetric())
    with pytest.raises(RuntimeError, match=r"replica 1 waits in MeanMetric\.forward, each of another object"):
        replicate(module, sequential=sequential)(BATCH)


@each_order
def test_a_metric_is_updated_with_the_arguments_of_the_call(replicate, sequential):
    def function(module, rows):
        predictions, record = rows.clone(), {"rows": rows.clone()}
        module.error.update(predictions, torch.zeros_like(rows))
        module.total.update(record["rows"])
        predictions.zero_()
        record["rows"].zero_()
        return rows

    module = Calling(function, error=MeanSquaredError(), total=SumMetric())
    with torch.inference_mode():  # tensors have no versions here
        replicate(module, sequential=sequential)(BATCH)
    assert module.error.compute() == 3.5
    assert module.total.compute() == 6


def test_a_replica_may_change_the_value_of_a_metric_in_place(replicate):
    def function(module, rows):
        return module.mean(rows.flatten()).mul_(10)

    assert replicate(Calling(function, mean=MeanMetric()), num_replicas=4)(BATCH) == 15


class Records(Metric):
    """A metric that stores the ids in its records, one record per sample."""

    def __init__(self):
        super().__init__()
        self.ids = []

    def update(self, records):
        self.ids += [record["id"].item() for record in records]

    def compute(self):
        return torch.tensor(self.ids)


def count_tokens(batch, num_replicas):
    return [(part, torch.tensor(5 * len(part))) for part in batch.chunk(num_replicas)]


def test_lists_per_sample_are_concatenated_if_scatter_counts_tokens(replicate):
    def function(module, rows):
        module.records.update([{"id": row} for row in rows])
        return [{"id": row} for row in rows]

    module = Calling(function, records=Records())
    output = replicate(module, scatter=count_tokens)(BATCH)
    assert [entry["id"].item() for entry in output] == [0, 1, 2, 3]
    assert module.records.ids == [0, 1, 2, 3]


class Means(Metric):
    """A metric of records and the number of tokens, one update per part."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.updates = []

    def update(self, ids, scale):
        self.updates.append((ids, scale))
        self.total += scale

    def compute(self):
        return self.total


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_lists_per_sample_are_joined_next_to_a_setting_if_scatter_counts_tokens(replicate, scale):
    def function(module, rows):
        module.metric.update([{"id": row} for row in rows], scale)

    module = Calling(function, metric=Means())
    replicate(module, scatter=count_tokens)(BATCH)
    [(records, given)] = module.metric.updates
    assert [record["id"].item() for record in records] == [0, 1, 2, 3]
    assert given == scale


@each_order
@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_returned_value_of_a_metric_is_exact(replicate, sequential, inference, seed):
    rows = torch.rand(10, 1, generator=torch.Generator().manual_seed(seed))

    def function(module, rows):
        value = module.mean(rows.flatten())
        return {"v": value, "parts": [value], "changed": module.mean.compute().add_(len(rows))}

    module = Calling(function, mean=MeanMetric())
    with torch.inference_mode(inference):
        output = replicate(module, num_replicas=3, sequential=sequential)(rows)
    assert output["v"] == output["parts"][0] == module.mean.compute()
    torch.testing.assert_close(output["changed"], module.mean.compute() + (4 * 4 + 3 * 3 + 3 * 3) / 10)


def test_a_single_replica_copies_no_arguments_of_metrics(replicate):
    class Keeps(Metric):
        full_state_update = False

        def __init__(self):
            super().__init__()
            self.kept = None

        def update(self, rows):
            self.kept = rows.data_ptr()

        def compute(self):
            return torch.zeros(())

    def function(module, rows):
        module.keeps.update(rows)
        assert module.keeps.kept == rows.data_ptr()
        module.total.update(rows)
        rows.zero_()

    module = Calling(function, keeps=Keeps(), total=SumMetric())
    replicate(module)(torch.full((1, 1), 5.0))
    assert module.total.compute() == 5


@pytest.mark.parametrize("count", [np.int64(2), torch.tensor(2), torch.tensor([2])], ids=repr)
def test_scatter_may_return_integers_of_other_types(replicate, count):
    module = Calling(lambda module, rows: rows.mean())
    assert replicate(module, scatter=lambda batch, num: [(part, count) for part in batch.chunk(num)])(BATCH) == 1.5


def test_a_number_of_samples_that_is_no_integer_is_named(replicate):
    module = replicate(Calling(None), scatter=lambda batch, num: [(part, 2.5) for part in batch.chunk(num)])
    with pytest.raises(TypeError, match=r"number of samples of each part as an integer, not 2\.5"):
        module(BATCH)


def test_keyword_arguments_alone_are_split_without_scatter(replicate):
    def scatter(batch, num_replicas):
        raise AssertionError("splits only positional arguments")

    module = Calling(lambda module, rows: (rows, torch.tensor(len(rows))))
    rows, sizes = replicate(module, scatter=scatter)(rows=BATCH)
    assert rows.equal(BATCH)
    assert sizes.tolist() == [2, 2]


def test_a_loss_of_one_element_is_weighted_by_its_denominator(replicate):
    def function(module, rows):
        losses = module.layer(rows)
        return losses[rows.flatten() > 0].mean(0)  # of shape [1]; 1 and 2 elements

    module = Calling(function)
    loss = replicate(module).run("training_step", BATCH)
    expected = module.layer(BATCH)[1:].mean()
    torch.testing.assert_close(loss, expected)


@each_order
def test_a_step_that_calls_the_replicated_module_is_refused(replicate, sequential):
    calls = []

    def function(module, rows):
        calls.append(len(rows))
        return replicated(rows) if len(calls) < 10 else rows

    replicated = replicate(Calling(function), sequential=sequential)
    with pytest.raises(RuntimeError, match="calls the module that runs on replicas"):
        replicated(BATCH)
    calls += [0] * 10
    assert replicated(BATCH).equal(BATCH)  # the error has not left it running


def test_an_identity_equals_only_identities_of_the_same_object():
    one, other = MeanMetric(), MeanMetric()
    assert Identity(one) == Identity(one)
    assert hash(Identity(one)) == hash(Identity(one))
    assert Identity(one) != Identity(other)
    old = Identity(one)
    del one
    assert old != Identity(other)
    assert old != Identity(MeanMetric())  # which may have the same id

"""Changes that replicas make to a module in one call equal those of one call with the whole batch, or are errors."""

from collections import defaultdict

import pytest
import torch
from torch import nn
from torchmetrics import SumMetric

from lightning_strategies_ext.replication.module import ReplicatedModule

BATCH = torch.arange(6.0).reshape(6, 1)


class Changing(nn.Module):
    """A module whose forward pass runs a function that changes the module."""

    def __init__(self, change, **attributes):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.change = change
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, rows):
        self.change(self, rows)
        return self.layer(rows)


def run(change, num_replicas=3, **attributes):
    """Returns a module after one call of its replicas."""
    module = Changing(change, **attributes)
    call_replicas(module, num_replicas)
    return module


def call_replicas(module, num_replicas):
    replicated = ReplicatedModule(module, [torch.device("cpu")] * num_replicas)
    try:
        replicated(BATCH)
    finally:
        replicated.close()


def append_by_label(module, rows):
    for row in rows.flatten().tolist():
        module.by_label[row // 4].append(row)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("labels", [[], [0.0], [0.0, 1.0], list(range(64))], ids=len)
def test_new_keys_of_some_replicas_in_a_defaultdict_are_merged(num_replicas, labels):
    by_label = defaultdict(list, {label: [-1.0] for label in labels})
    module = run(append_by_label, num_replicas, by_label=by_label)
    old = {label: [-1.0] for label in labels}
    assert module.by_label == {**old, 0.0: [*old.get(0.0, []), 0, 1, 2, 3], 1.0: [*old.get(1.0, []), 4, 5]}


def test_an_entry_that_replaces_a_container_is_kept():
    assert run(lambda module, rows: module.state.update(entry=5), state={"entry": []}).state == {"entry": 5}
    with pytest.raises(RuntimeError, match=r"changed `self.state\['entry'\]` of Changing"):
        run(lambda module, rows: module.state.update(entry=rows.sum().item()), state={"entry": []})


def test_one_list_under_two_names_is_merged_once():
    rows, child = [], nn.Identity()
    child.rows = rows

    def append(module, batch):
        module.one.extend(batch.flatten().tolist())
        assert module.one is module.two is module.child.rows is module.by_name["rows"]

    module = run(append, one=rows, two=rows, by_name={"rows": rows}, child=child)
    assert module.one is module.two is child.rows
    assert rows == [0, 1, 2, 3, 4, 5]


def cyclic_list():
    value = []
    value.append(value)
    return value


def cyclic_dict():
    value = {"rows": [], "pair": ()}
    value["pair"] = (value, [])
    return value


def test_lists_in_tuples_of_a_list_are_merged():
    module = run(lambda module, rows: module.pairs[0][1].extend(rows.flatten().tolist()), pairs=[("n", [])])
    assert module.pairs == [("n", [0, 1, 2, 3, 4, 5])]
    with pytest.raises(RuntimeError, match=r"the list `self\.pairs`, to which a step may only append,"):
        run(lambda module, rows: module.pairs.__setitem__(0, ("n", len(rows))), pairs=[("n", [])])


def test_containers_that_contain_themselves():
    assert run(lambda module, rows: module.cyclic.append(len(rows)), cyclic=cyclic_list()).cyclic[1:] == [2, 2, 2]
    module = run(lambda module, rows: module.cyclic["rows"].append(len(rows)), cyclic=cyclic_dict())
    assert module.cyclic["rows"] == [2, 2, 2]
    assert module.cyclic["pair"][0] is module.cyclic


def count_in_place(module, rows):
    module.seen += len(rows)


def count_by_label(module, rows):
    module.seen += torch.bincount((rows.flatten() % 2).long(), minlength=len(module.seen))


def count_again(module, rows):
    module.seen = module.seen + 2 * len(rows)


@pytest.mark.parametrize(
    ("count", "seen"),
    [
        (count_in_place, torch.tensor(4)),
        (count_in_place, torch.tensor([[1], [1]])),
        (count_in_place, torch.tensor(250, dtype=torch.uint8)),
        (count_by_label, torch.tensor([4, 4])),
    ],
)
def test_buffers_that_may_count_samples_warn(count, seen):
    with pytest.warns(UserWarning, match=r"`self\.seen` has grown by 2 in each of 3 replicas, .* 2 samples each"):
        run(count, seen=seen.clone())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        (lambda module, rows: module.value.add_(1), torch.tensor(3), 4),
        (lambda module, rows: module.value.add_(1), torch.tensor(3, dtype=torch.int8), 4),
        (lambda module, rows: module.value.mul_(2), torch.tensor(2.0), 4),
        (lambda module, rows: module.value.fill_(4), torch.tensor(0), 4),
        (lambda module, rows: module.value.fill_(8.0), torch.tensor(0.0), 8),
        (lambda module, rows: module.value.copy_(torch.tensor([4, 4, 4])), torch.zeros(3, dtype=torch.int32), [4] * 3),
        (lambda module, rows: module.value.fill_(len(rows)), torch.tensor(0, dtype=torch.uint16), 2),
        (lambda module, rows: module.value.fill_(len(rows)), torch.tensor(0, dtype=torch.uint32), 2),
        (lambda module, rows: module.value.copy_(torch.tensor(2.0)), torch.tensor(0.0).to(torch.float8_e4m3fn), 2),
        (lambda module, rows: module.value.fill_(True), torch.tensor(False), True),
        (lambda module, rows: module.value.add_(rows.mean()), torch.tensor(0.0), 0.5),  # the first replica's
    ],
)
def test_buffers_that_do_not_count_samples_are_kept(change, before, after):
    value = run(change, value=before.clone()).value
    assert (value.float() if value.is_floating_point() else value).tolist() == after


def test_buffers_that_code_that_runs_once_registers_are_kept():
    class Computing(SumMetric):
        def compute(self):
            owner.register_buffer("late", torch.ones(1))
            return super().compute()

    owner = Changing(lambda module, rows: module.total.compute(), total=Computing(), early=torch.zeros(1))
    with pytest.warns(UserWarning, match="compute"):
        call_replicas(owner, 2)
    assert owner.late.tolist() == [1]
    assert owner.early.tolist() == [0]


def test_a_buffer_that_counts_steps_is_kept():
    def count(module, rows):
        module.steps += 1

    assert run(count, steps=torch.tensor(3)).steps == 4


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda module, rows: setattr(module, "layer", nn.Linear(1, 1)), "set the submodule `self.layer` of Last"),
        (lambda module, rows: setattr(module, "other", nn.Linear(1, 1)), "set the submodule `self.other` of Last"),
        (
            lambda module, rows: setattr(module.layer, "weight", nn.Parameter(torch.ones(1, 1))),
            "set the parameter `self.weight`",
        ),
        (lambda module, rows: setattr(module.layer, "bias", None), "set the parameter `self.bias`"),
        (lambda module, rows: delattr(module.layer, "bias"), "deleted the parameter `self.bias`"),
    ],
)
def test_parameters_and_submodules_that_a_step_sets_are_rejected(change, name):
    class Last(Changing):
        def forward(self, rows):
            result = self.layer(rows)
            change(self, rows)
            return result

    with pytest.raises(RuntimeError, match=rf"^A step {name}.* in a hook that runs once, such as") as caught:
        call_replicas(Last(None), 2)
    assert "differently" not in str(caught.value)


@pytest.mark.parametrize("value", [3, [1], torch.zeros(1)], ids=["number", "list", "buffer"])
def test_an_attribute_that_all_replicas_delete_is_deleted(value):
    assert not hasattr(run(lambda module, rows: delattr(module, "value"), value=value), "value")


@pytest.mark.parametrize("value", [3, [1], torch.zeros(1)], ids=["number", "list", "buffer"])
def test_an_attribute_that_one_replica_deletes_is_rejected(value):
    def delete(module, rows):
        if rows[0] == 0:
            del module.value

    with pytest.raises(RuntimeError, match=r"`self\.value`"):
        run(delete, value=value)

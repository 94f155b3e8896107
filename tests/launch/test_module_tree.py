"""Changes to the tree of a module are applied to the sent objects. These tests run no stage."""

import torch
from torch import nn

from lightning_strategies_ext.launch.tasks.module_tree import ModuleTree, put_parts


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2))


def test_a_moved_buffer_has_its_values_and_its_replacement_is_new():
    model = nn.ModuleList([Averages(), Averages()])
    sent = [holder.average for holder in model]
    tree = ModuleTree(model)
    model[0].register_buffer("kept", model[1].average)
    model[1].average = torch.ones(2)
    assert {name: id(tensor) for name, tensor in tree.values(model)} == {
        "0.average": id(sent[0]),
        "1.average": id(sent[1]),
    }
    changes = dict(tree.changes(model))
    assert changes.keys() == set(model)
    assert changes[model[0]]["_buffers"]["kept"] is sent[1]
    assert changes[model[1]]["_buffers"]["average"] is model[1].average


def test_a_sent_buffer_has_the_values_of_its_replacement():
    model = Averages()
    sent = model.average
    tree = ModuleTree(model)
    model.average = sent + 1
    assert [(name, tensor.tolist()) for name, tensor in tree.values(model)] == [("average", [1.0, 1.0])]
    assert list(tree.changes(model)) == []


def test_parts_keep_their_order():
    model, sent = (nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    tree = ModuleTree(model)
    model.insert(0, nn.Tanh())
    last = model[2]
    del model[2]
    model.add_module("last", last)
    ((holder, parts),) = tree.changes(model)
    assert holder is model
    put_parts(sent, parts)
    assert list(sent) == list(model)
    assert list(sent._modules) == ["0", "1", "last"]

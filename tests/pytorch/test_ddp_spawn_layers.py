"""After a stage of ``ddp_spawn_ext``, the LightningModule has the same layers as after a stage in one process."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from tests.support.ddp_spawn_trainers import ALONE, seeded
from tests.support.models import (
    MLP,
    WithBatchNorm,
    assert_same_bits,
    dataset,
    loader,
    make_trainer,
    state_of,
)

pytestmark = pytest.mark.processes

# --- layers that are created late ---


class Lazy(MLP):
    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))

    def configure_model(self):
        if any(nn.parameter.is_lazy(parameter) for parameter in self.parameters()):
            self.net(dataset().tensors[0])


def test_lazy_layers_are_returned(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a worker would have more threads, and sums of other bits
    states = []
    for strategy in ("auto", "ddp_spawn_ext"):
        model = seeded(Lazy)
        first = model.net[0]
        trainer = make_trainer(strategy, **ALONE, max_epochs=1)
        trainer.fit(model, loader())
        assert first is model.net[0]
        assert type(first) is nn.Linear
        assert not first._forward_pre_hooks
        states.append(state_of(model))
        (metrics,) = trainer.test(model, loader(), verbose=False)
        states[-1]["test_loss"] = torch.tensor(metrics["test_loss"])
        assert torch.isfinite(model.net(dataset().tensors[0])).all()
    assert_same_bits(states[1], states[0])


class Prunes(MLP):
    def setup(self, stage):
        nn.utils.prune.l1_unstructured(self.net[0], "weight", 0.5)

    def teardown(self, stage):
        nn.utils.prune.remove(self.net[0], "weight")


def test_parts_that_the_stage_removed_are_removed():
    states = []
    for strategy in ("auto", "ddp_spawn_ext"):
        model = seeded(Prunes)
        make_trainer(strategy, **ALONE, max_epochs=1).fit(model, loader())
        states.append(state_of(model))
    assert_same_bits(states[1], states[0])
    assert (states[1]["net.0.weight"] == 0).sum() > 50


# --- layers that are moved ---


class Rearranged(WithBatchNorm):
    """A model that moves its layers in ``setup``, once, and replaces a buffer of the layers in each step."""

    is_done = False

    def make_net(self) -> nn.Module:
        layers = super().make_net()
        layers.register_buffer("average", torch.zeros(()))
        return layers

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def setup(self, stage):
        if not self.is_done:
            self.rearrange()
            self.is_done = True

    def rearrange(self) -> None:
        raise NotImplementedError

    def parts(self) -> tuple[Any, nn.Module]:
        """Returns the module with the buffer, and the module with all layers."""
        return self.net, self.net

    def forward(self, x):
        layers, whole = self.parts()
        output = whole(x)
        if self.training:
            layers.average = layers.average * 0.9 + output.detach().mean()
        return self.ends(output)

    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def new_layer() -> nn.Linear:
    """Returns a layer without random numbers, because those of a worker may differ."""
    layer = nn.Linear(3, 3)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Wraps(Rearranged):
    def rearrange(self) -> None:
        self.net = nn.Sequential(self.net, new_layer())

    def parts(self):
        return (self.net[0] if self.is_done else self.net), self.net


class Compiles(Rearranged):
    def rearrange(self) -> None:
        self.net = torch.compile(self.net, backend="eager")

    def parts(self):
        return getattr(self.net, "_orig_mod", self.net), self.net


class Renames(Rearranged):
    def rearrange(self) -> None:
        self.body = self.net
        del self.net

    def parts(self):
        return (self.body, self.body) if self.is_done else (self.net, self.net)


class Swaps(Rearranged):
    def rearrange(self) -> None:
        self.ends[0], self.ends[1] = self.ends[1], self.ends[0]


class Inserts(Rearranged):
    def rearrange(self) -> None:
        self.ends.insert(0, new_layer())


class Masks(Rearranged):
    def rearrange(self) -> None:
        nn.utils.prune.l1_unstructured(self.ends[0], "weight", 0.5)


class Parametrizes(Rearranged):
    def rearrange(self) -> None:
        nn.utils.parametrizations.weight_norm(self.ends[0])


class ParametrizesMore(Rearranged):
    def __init__(self) -> None:
        super().__init__()
        register_parametrization(self.ends[0], "weight", Symmetric())

    def rearrange(self) -> None:
        register_parametrization(self.ends[0], "bias", Positive())


class ParametrizesNoMore(Rearranged):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.ends[0])

    def rearrange(self) -> None:
        remove_parametrizations(self.ends[0], "weight")


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


class Positive(nn.Module):
    def forward(self, bias):
        return bias.abs()


KINDS = [Wraps, Compiles, Renames, Swaps, Inserts, Masks, Parametrizes, ParametrizesMore, ParametrizesNoMore]


@pytest.mark.parametrize(
    ("kind", "first"), [*((kind, "fit") for kind in KINDS), (Wraps, "validate"), (Swaps, "validate")]
)
def test_layers_that_the_stage_moved_are_returned_with_their_values(monkeypatch, kind, first):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a worker would have more threads, and sums of other bits
    states, are_present = [], []
    for strategy in ("auto", "ddp_fork_ext"):
        model = seeded(kind)
        held = list(model.parameters())
        if first == "validate":
            make_trainer(strategy, **ALONE).validate(model, loader(), verbose=False)
        for epoch in range(2):
            make_trainer(strategy, **ALONE, max_epochs=1).fit(model, loader())
            states.append({f"{epoch} {name}": tensor for name, tensor in state_of(model).items()})
        are_present.append([any(own is each for own in model.parameters()) for each in held])
        states[-1]["output"] = model.eval()(dataset().tensors[0]).detach()
    assert are_present[1] == are_present[0]
    assert_same_bits(states[2], states[0])
    assert_same_bits(states[3], states[1])


class IsParametrized(WithBatchNorm):
    def make_net(self) -> nn.Module:
        net = super().make_net()
        nn.utils.parametrizations.weight_norm(net[0])
        return nn.Sequential(
            *net,
            nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
            nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
        )


def test_parametrized_layers_are_sent_trained_and_returned(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    states = []
    for name in ("auto", "ddp_fork_ext", "ddp_spawn_ext"):
        model = seeded(IsParametrized)
        held = [*model.parameters(), *model.buffers()]
        for _ in range(2):
            make_trainer(name, **ALONE, max_epochs=1).fit(model, loader())
        assert all(any(own is each for own in (*model.parameters(), *model.buffers())) for each in held)
        states.append({**state_of(model), "output": model.eval().net(dataset().tensors[0]).detach()})
    assert_same_bits(states[1], states[0])
    assert_same_bits(states[2], states[0])

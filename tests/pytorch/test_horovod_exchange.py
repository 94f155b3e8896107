"""Exchanges of ``horovod_ext``: each gradient once per accumulation window, or steps with Adasum."""

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_strategies_ext import HorovodStrategy
from tests.pytorch.test_horovod import Accumulates
from tests.support.horovod_ranks import run_horovod, try_horovod
from tests.support.models import MLP, ManualMLP, assert_close, loader, make_trainer, weights_after
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes

# --- one exchange per window ---


WINDOWS: dict[str, tuple[Any, dict[str, Any], int]] = {
    # Eight batches per epoch.
    "of one": (MLP, {}, 8),
    "of three and a last of two": (MLP, {"accumulate_grad_batches": 3}, 3),
    "of four": (MLP, {"accumulate_grad_batches": 4}, 2),
    "of one in the first epoch and of four in the second": (MLP, {"max_epochs": 2, "schedule": {0: 1, 1: 4}}, 10),
    "of two, under manual optimization": (Accumulates, {}, 4),
}


def count_exchanges(make_model: Any, kwargs: dict[str, Any], path: Path) -> int:
    """Returns the number of exchanges of each gradient, from Horovod's timeline."""
    import horovod.torch as hvd

    kwargs = {"max_epochs": 1, **kwargs}
    if schedule := kwargs.pop("schedule", None):
        kwargs["callbacks"] = [GradientAccumulationScheduler(schedule)]
    pl.seed_everything(11, verbose=False)
    trainer = make_trainer("horovod_ext", **kwargs)
    trainer.strategy.setup_environment()
    hvd.start_timeline(str(path))
    trainer.fit(make_model(), loader())
    hvd.stop_timeline()
    if hvd.rank() > 0:
        return -1
    for _ in range(1000):
        if path.read_text().rstrip().endswith("]"):
            break
        time.sleep(0.02)
    events = json.loads(path.read_text())
    names = {event["pid"]: event["args"].get("name", "") for event in events if event.get("name") == "process_name"}
    assert not any("uneven_inputs" in name for name in names.values())  # counting batches needs no exchange
    counts = Counter(names.get(event["pid"], "") for event in events if event.get("name") == "ALLREDUCE")
    gradients = {name: count for name, count in counts.items() if ".gradient." in name}
    assert len(gradients) == 4
    assert len(set(gradients.values())) == 1
    return next(iter(gradients.values()))


def count_all_exchanges(directory: str) -> dict[str, int]:
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # Horovod starts a thread for it, which occupies a core of rank 0
    return {
        name: count_exchanges(make_model, kwargs, Path(directory, f"{index}.json"))
        for index, (name, (make_model, kwargs, _)) in enumerate(WINDOWS.items())
    }


def test_gradients_are_exchanged_once_per_window(tmp_path):
    counts = run_horovod("horovodrun", count_all_exchanges, str(tmp_path))[0]
    assert counts == {name: expected for name, (_, _, expected) in WINDOWS.items()}


# --- exchanged gradients, and the time of the exchange ---


class Spectral(MLP):
    """A model with a complex parameter, whose gradient is a conjugated view."""

    def __init__(self):
        super().__init__()
        self.spectrum = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.cfloat) * 0.3)

    def loss(self, batch):
        transformed = torch.fft.rfft(batch[0]) @ self.spectrum.conj()
        return functional.cross_entropy(self.net(batch[0]) + transformed.abs() + transformed.real, batch[1])


class Excludes(MLP):
    """A model with a separate bias on each rank."""

    def __init__(self):
        super().__init__()
        self._ddp_params_and_buffers_to_ignore = ["net.2.bias"]


class Probes(MLP):
    """A model that computes gradients in a hook and discards them."""

    def on_train_batch_start(self, batch, batch_idx):
        self.loss(batch).backward()
        self.zero_grad()


class BackwardByHand(ManualMLP):
    def training_step(self, batch, batch_idx):
        self.loss(batch).backward()
        self.optimizers().step()


class EditsGradients(MLP):
    """A model that edits gradients in `backward` and in `on_after_backward`, before and after the exchange."""

    def loss(self, batch):
        hidden = checkpoint(self.net[:2], batch[0].requires_grad_(), use_reentrant=True)  # a nested backward pass
        return functional.cross_entropy(self.net[2](hidden), batch[1])

    def backward(self, loss):
        torch.autograd.grad(loss, self.net[2].weight, retain_graph=True)
        (2 * loss).backward()
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 + parameter.grad.abs())

    def on_after_backward(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.1, 0.1)


class EditsManually(EditsGradients):
    """A model with a rank that has no gradient of one parameter, and with a backward pass outside of the strategy."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.scale = torch.nn.Parameter(torch.ones(3))

    def loss(self, batch):
        return functional.cross_entropy(self.net(batch[0]) * (self.scale if self.global_rank else 1.0), batch[1])

    def backward(self, loss):
        super().backward(self.other_loss)

    def training_step(self, batch, batch_idx):
        self.other_loss = self.loss(batch)
        self.manual_backward(self.other_loss * 1)
        self.optimizers().step()
        self.optimizers().zero_grad()


class Toggles(ManualMLP):
    """A model that toggles an optimizer after the forward pass."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        loss = self.loss(batch)
        self.toggle_optimizer(optimizer)
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[index].parameters(), lr=0.1) for index in (0, 2)]


class NoGradient(torch.autograd.Function):
    """A function that returns None as the gradient of the first argument."""

    @staticmethod
    def forward(ctx, parameter, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


class GivesNone(MLP):
    def __init__(self):
        super().__init__()
        self.unmoved = torch.nn.Parameter(torch.ones(3))

    def loss(self, batch):
        return functional.cross_entropy(NoGradient.apply(self.unmoved, self.net(batch[0])), batch[1])


class Twice(MLP):
    """A model with two backward passes, each through half of the loss, instead of one backward pass."""

    def backward(self, loss):
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()


class ContinuesAfterException(MLP):
    """A model that catches an exception of a backward pass after the gradients of the last layer."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        def fail(gradient):
            raise MemoryError

        self.net[0].weight.register_hook(fail)
        with pytest.raises(MemoryError):
            self.manual_backward(self.loss(batch))


EACH: dict[str, tuple[Any, dict[str, Any]]] = {
    "complex": (Spectral, {}),
    "excluded": (Excludes, {}),
    "local": (Probes, {}),
    "edited": (EditsGradients, {}),
    "edited while they add up": (EditsGradients, {"accumulate_grad_batches": 2}),
    "edited under manual optimization": (EditsManually, {}),
    "toggled after the forward pass": (Toggles, {}),
}


def train_each(strategy: str) -> dict[str, Any]:
    weights = {}
    for name, (make_model, kwargs) in EACH.items():
        finds_unused = make_model is EditsManually and strategy == "ddp_ext"
        full_name = f"{strategy}_find_unused_parameters_true" if finds_unused else strategy
        weights[name] = weights_after(full_name, make_model, max_epochs=1, **kwargs)
    if strategy == "horovod_ext":
        weights["without a gradient"] = weights_after(strategy, GivesNone, max_epochs=1)
        weights["twice"] = weights_after(strategy, Twice, max_epochs=1)
        with pytest.raises(RuntimeError, match=r"`op='sum'`: a second backward pass .* gradient\.net\.2\..*"):
            make_trainer(HorovodStrategy(op="sum")).fit(Twice(), loader())
        with pytest.raises(RuntimeError, match=r"gradient\.net\.2\..* Call `self.manual_backward\(loss\)`"):
            make_trainer(strategy).fit(BackwardByHand(), loader())
        with pytest.raises(RuntimeError, match="The previous backward pass raised an exception"):
            make_trainer(strategy).fit(ContinuesAfterException(), loader())
    return weights


def test_complex_excluded_local_edited_and_toggled_gradients_are_exchanged_as_by_ddp():
    expected = run_ranks(train_each, "ddp_ext")
    for ext, stock in zip(run_horovod("horovodrun", train_each, "horovod_ext"), expected, strict=True):
        for name in stock:
            assert_close(ext[name], stock[name])
        assert ext["without a gradient"].pop("unmoved").tolist() == [1.0] * 3
        for name in ("without a gradient", "twice"):
            assert_close(ext[name], stock["local"])
    biases = [rank["excluded"]["net.2.bias"] for rank in expected]
    assert not torch.allclose(*biases)


# --- Adasum ---


class SpectralExcludes(Spectral, Excludes):
    """A model with a complex parameter, and with a separate parameter on each rank."""


def adasum() -> list[Any]:
    weights = weights_after(HorovodStrategy(op="adasum"), SpectralExcludes, max_epochs=1)
    return [weights, weights_after("horovod_ext", SpectralExcludes, max_epochs=1)]


def test_adasum_combines_steps_over_mpi():
    first, second = run_horovod("mpirun", adasum)
    assert not torch.allclose(first[0].pop("net.2.bias"), second[0].pop("net.2.bias"))
    assert_close(first[0], second[0], 0)
    assert any((weights - first[1][name]).abs().max() > 1e-3 for name, weights in first[0].items())


def test_adasum_without_mpi_is_refused():
    _, outcomes = try_horovod("horovodrun", adasum)
    assert all("requires Horovod over MPI" in outcome.text for outcome in outcomes.values())
    assert outcomes


# --- gradients in memory that autograd still needs ---


class Pause(torch.autograd.Function):
    """A function that delays the backward pass, so that an exchange ends during it."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(0.5)
        return gradient.clone()


class SharesMemory(pl.LightningModule):
    """A model in which the gradient of the offset shares memory with the gradient of the hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.offset = torch.nn.Parameter(torch.zeros(32))
        self.seen: list[torch.Tensor] = []

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return (Pause.apply(self.first(rows)) + self.offset.view(4, 8)).pow(2).mean()  # type: ignore[no-untyped-call]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += torch.autograd.grad(self.loss(batch[0]), [*self.parameters()])
        return self.loss(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += [each.grad.clone() for each in self.parameters() if each.grad is not None]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def gradients_of_one_step() -> list[torch.Tensor]:
    pl.seed_everything(11, verbose=False)
    model = SharesMemory()
    make_trainer(HorovodStrategy(num_groups=0), max_steps=1).fit(model, loader())
    return model.seen


def test_a_gradient_is_not_exchanged_in_memory_from_which_others_are_computed() -> None:
    of_ranks = run_horovod("horovodrun", gradients_of_one_step)
    num = len(of_ranks[0]) // 2
    assert num == 3
    for index in range(num):
        mean = (of_ranks[0][index] + of_ranks[1][index]) / 2
        for seen in of_ranks:
            torch.testing.assert_close(seen[num + index], mean)

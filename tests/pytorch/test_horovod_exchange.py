"""What ``horovod_ext`` exchanges: each gradient once per window of accumulation, or steps with Adasum."""

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

from lightning_strategies_ext import HorovodStrategy
from tests.pytorch.test_horovod import Accumulates
from tests.support.horovod_ranks import run_horovod, try_horovod
from tests.support.models import MLP, assert_close, loader, make_trainer, weights_after
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
    """How often each gradient was exchanged, by Horovod's own timeline."""
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
    assert not any("uneven_inputs" in name for name in names.values())  # nothing travels where batches are counted
    counts = Counter(names.get(event["pid"], "") for event in events if event.get("name") == "ALLREDUCE")
    gradients = {name: count for name, count in counts.items() if ".gradient." in name}
    assert len(gradients) == 4
    assert len(set(gradients.values())) == 1
    return next(iter(gradients.values()))


def count_all_exchanges(directory: str) -> dict[str, int]:
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # Horovod starts a thread for it, which keeps a core of rank 0's busy
    return {
        name: count_exchanges(make_model, kwargs, Path(directory, f"{place}.json"))
        for place, (name, (make_model, kwargs, _)) in enumerate(WINDOWS.items())
    }


def test_gradients_are_exchanged_once_per_window(tmp_path):
    counts = run_horovod("horovodrun", count_all_exchanges, str(tmp_path))[0]
    assert counts == {name: expected for name, (_, _, expected) in WINDOWS.items()}


# --- which gradients are exchanged, and when ---


class Spectral(MLP):
    """Has a complex parameter, whose gradient is a conjugated view."""

    def __init__(self):
        super().__init__()
        self.spectrum = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.cfloat) * 0.3)

    def loss(self, batch):
        transformed = torch.fft.rfft(batch[0]) @ self.spectrum.conj()
        return functional.cross_entropy(self.net(batch[0]) + transformed.abs() + transformed.real, batch[1])


class Excludes(MLP):
    """Each rank trains a bias of its own."""

    def __init__(self):
        super().__init__()
        self._ddp_params_and_buffers_to_ignore = ["net.2.bias"]


class Probes(MLP):
    """Computes gradients in a hook, of which the optimizer sees none."""

    def on_train_batch_start(self, batch, batch_idx):
        self.loss(batch).backward()
        self.zero_grad()


class BackwardByHand(MLP):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.loss(batch).backward()
        self.optimizers().step()


def train_each(strategy: str) -> dict[str, Any]:
    weights = {
        make_model.__name__: weights_after(strategy, make_model, max_epochs=1)
        for make_model in (Spectral, Excludes, Probes)
    }
    if strategy == "horovod_ext":
        with pytest.raises(RuntimeError, match=r"gradient\.net\.2\..* Call `self.manual_backward\(loss\)`"):
            make_trainer(strategy).fit(BackwardByHand(), loader())
    return weights


def test_complex_excluded_and_local_gradients_are_exchanged_as_by_ddp():
    expected = run_ranks(train_each, "ddp_ext")
    for ours, theirs in zip(run_horovod("horovodrun", train_each, "horovod_ext"), expected, strict=True):
        for name in theirs:
            assert_close(ours[name], theirs[name])
    biases = [rank["Excludes"]["net.2.bias"] for rank in expected]
    assert not torch.allclose(*biases)


# --- Adasum ---


class SpectralExcludes(Spectral, Excludes):
    """A complex parameter and one of each rank's own."""


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
    assert all("needs Horovod over MPI" in outcome.text for outcome in outcomes.values())
    assert outcomes

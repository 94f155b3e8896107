"""``CommunicationMonitor`` changes no results, adds no collectives, and names the bottleneck."""

import json
import logging
import time
from pathlib import Path
from statistics import mode
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_strategies_ext import CommunicationMonitor, DDPStrategy
from lightning_strategies_ext.monitoring.analysis import PHASES
from lightning_strategies_ext.shm.executor import OperationExecutor
from tests.support.examples import example_packages
from tests.support.horovod_ranks import run_horovod
from tests.support.models import (
    MLP,
    NUM_CLASSES,
    NUM_FEATURES,
    TwoOptimizers,
    assert_same_bits,
    dataset,
    loader,
    make_trainer,
    state_of,
)
from tests.support.ranks import outcomes_of_ranks, run_ranks

SLOW_S = 0.06


def train(monitor: CommunicationMonitor | None, strategy: Any, model: pl.LightningModule, **arguments: Any) -> Any:
    """Trains with or without a monitor, with eight batches per epoch on each of two ranks."""
    callbacks = [*arguments.pop("callbacks", []), *([monitor] if monitor else [])]
    batches = arguments.pop("batches", None) or loader()
    trainer = make_trainer(strategy, callbacks=callbacks, **arguments)
    trainer.fit(model, batches, loader() if arguments.get("limit_val_batches") else None)
    return trainer


def seeded(kind: type[pl.LightningModule]) -> pl.LightningModule:
    pl.seed_everything(11, verbose=False)
    return kind()


def num_bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


class Wide(MLP):
    """A model whose last layers' gradients are ready long before the gradients of its first layers."""

    def make_net(self) -> nn.Module:
        inner = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())]
        return nn.Sequential(nn.Linear(NUM_FEATURES, 256), nn.ReLU(), *inner, nn.Linear(256, NUM_CLASSES))


class SlowSamples(torch.utils.data.Dataset):
    """A dataset that is slow on one rank."""

    def __init__(self, is_slow: bool) -> None:
        self.samples, self.is_slow = dataset(), is_slow

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if self.is_slow and index % 4 == 0:
            time.sleep(SLOW_S)
        return self.samples[index]


class SlowSteps(MLP):
    """A model with slow forward passes on rank 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 0:
            time.sleep(SLOW_S)
        return super().training_step(batch, batch_idx)


class Counts:
    """A counter of the collectives that this rank starts, in all threads."""

    def __init__(self) -> None:
        self.num = 0
        self._own = {name: getattr(OperationExecutor, name) for name in ("start", "all_reduce")}
        for name, method in self._own.items():
            setattr(OperationExecutor, name, self._counting(method))

    def _counting(self, method: Any) -> Any:
        def count(*args: Any) -> Any:
            self.num += 1
            return method(*args)

        return count

    def close(self) -> None:
        for name, method in self._own.items():
            setattr(OperationExecutor, name, method)


# --- no changes of results ---

TRAININGS: dict[str, tuple[Any, type[pl.LightningModule], dict[str, Any]]] = {
    "plain": ("ddp_ext", MLP, {}),
    "accumulation and validation": (
        *("ddp_ext", MLP),
        {"accumulate_grad_batches": 3, "limit_val_batches": 2, "val_check_interval": 4},
    ),
    "manual optimization": ("ddp_ext_find_unused_parameters_true", TwoOptimizers, {}),
    "join": (lambda: DDPStrategy(uneven_inputs="join"), MLP, {}),
    "bf16": ("ddp_ext_bf16", MLP, {}),
    "powersgd": ("ddp_ext_powersgd", Wide, {}),
    "localsgd": (lambda: DDPStrategy(compression="localsgd"), MLP, {}),
    "buckets": (lambda: DDPStrategy(bucket_cap_mb=0.25), Wide, {}),
    "Lightning's": ("ddp", MLP, {}),
}
COLLECTIVES = ("plain", "accumulation and validation", "manual optimization", "buckets")


def train_all(directory: str) -> dict[str, Any]:
    """Trains each case with and without a monitor; returns weights, collectives, and the results of the monitor."""
    found: dict[str, Any] = {}
    train(None, "ddp_ext", seeded(MLP))  # each later training first checks this group, with an all-reduce
    for name, (strategy, kind, trainer_arguments) in TRAININGS.items():
        states, nums = [], []
        arguments = {"every_n_steps": 4, "observed_steps": 2, "plot": name == "plain"}
        monitor = CommunicationMonitor(**arguments, dirpath=Path(directory, name))
        for each in (None, monitor):
            model, counts = seeded(kind), Counts()
            with example_packages():  # matplotlib
                train(each, strategy() if callable(strategy) else strategy, model, **trainer_arguments)
            counts.close()
            states.append(state_of(model))
            nums.append(counts.num)
        found[name] = {
            "states": states,
            "collectives": nums,
            "gradients": num_bytes_of(model),
            "times": monitor.rank_times,
            "advice": monitor.advice,
            "files": monitor.files,
        }
    return found


@pytest.mark.processes
def test_weights_and_collectives_are_those_without_it(tmp_path: Path) -> None:
    of_ranks = run_ranks(train_all, str(tmp_path))
    for found in of_ranks:
        for name, training in found.items():
            assert_same_bits(*training["states"])
            if name in COLLECTIVES:
                assert training["collectives"][0] == training["collectives"][1] > 0
    first, second = of_ranks
    for name, training in first.items():
        assert [times.rank for times in training["times"]] == [0, 1], name
        assert training["advice"]
        pictures = {"timeline.png"} if name == "plain" else set()
        assert {path.name for path in training["files"]} == {"trace.json", *pictures}
        assert all(path.stat().st_size for path in training["files"])
        for times in training["times"]:
            if name in ("plain", "accumulation and validation", "join", "Lightning's", "buckets"):
                assert times.num_bytes == training["gradients"], name
            assert times.exposed_ms + times.hidden_ms == pytest.approx(times.communication_ms)
            assert times.waiting_ms + times.transfer_ms == pytest.approx(times.exposed_ms)
            assert 0 < times.data_ms + times.forward_ms + times.backward_ms < times.step_ms
    assert all(not training["times"] and not training["files"] for training in second.values())
    own = {name: (training["times"][0], training["gradients"]) for name, training in first.items()}
    assert own["bf16"][0].num_bytes == own["bf16"][1] / 2
    assert own["powersgd"][0].num_bytes < own["powersgd"][1]  # not compressed in the first ten steps
    assert own["buckets"][0].hidden_ms > 0
    trace = json.loads((tmp_path / "plain" / "trace.json").read_text())
    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in drawn} == {0, 1}
    assert {event["name"] for event in drawn} >= {"data", "forward", "backward", "gradients"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in drawn)


# --- the bottleneck ---


def train_slowly(directory: str) -> dict[str, Any]:
    """Trains with a slow rank, a logger, and a progress bar; the second time, files of another monitor exist."""
    found: dict[str, Any] = {}
    monitor = CommunicationMonitor(dirpath=directory, plot=False)
    bar = TQDMProgressBar(refresh_rate=1000)
    for name, kind in (("data", MLP), ("forward", SlowSteps)):
        model = seeded(kind)
        trainer = make_trainer(
            "ddp_ext",
            callbacks=[monitor, bar],
            logger=CSVLogger(directory, name=name, version=0),
            log_every_n_steps=4,
            max_epochs=3,
            enable_progress_bar=True,
        )
        is_slow = name == "data" and trainer.global_rank == 1
        shown: list[Any] = []
        model.on_train_epoch_end = lambda bar=bar, trainer=trainer, shown=shown: shown.append(
            bar.get_metrics(trainer, trainer.lightning_module).get("comm")
        )
        began = time.monotonic()
        trainer.fit(model, DataLoader(SlowSamples(is_slow), batch_size=4))
        took_ms = 1e3 * (time.monotonic() - began)
        found[name] = monitor.rank_times, monitor.advice, shown, sorted(trainer.callback_metrics), took_ms
        assert "get_metrics" not in vars(bar)
    return found


@pytest.mark.processes
def test_the_slowest_rank_is_named_with_what_it_is_slow_in(tmp_path: Path) -> None:
    first, second = run_ranks(train_slowly, str(tmp_path))
    for name, slow, where in (("data", 1, "data loading"), ("forward", 0, "the forward pass")):
        times, advice, shown, metrics, took_ms = first[name]
        assert advice.startswith(f"Rank {slow} is the bottleneck: other ranks wait "), advice
        assert f"in {where}" in advice
        # On a busy machine, everything except the sleep may take longer, but no phase longer than the step.
        assert times[1 - slow].waiting_ms - times[slow].waiting_ms >= 0.25e3 * SLOW_S
        assert times[slow].phase_ms(name) - times[1 - slow].phase_ms(name) >= 0.25e3 * SLOW_S
        for each in times:
            parts_ms = sum(each.phase_ms(phase) for phase in PHASES) + each.waiting_ms + each.transfer_ms
            assert parts_ms == pytest.approx(each.step_ms)
            assert each.num_steps * (each.step_ms - each.other_ms) <= took_ms
        assert shown[-1].endswith("%")
        assert second[name][2] == [None] * 3
        assert metrics == second[name][3]  # only values that the user has logged
        rows = (tmp_path / name / "version_0" / "metrics.csv").read_text().splitlines()
        column = rows[0].split(",").index("communication/slowest_rank")
        slowest_ranks = [row.split(",")[column] for row in rows[1:] if row.split(",")[column]]
        assert mode(map(float, slowest_ranks)) == slow, slowest_ranks  # on a busy machine, not in each window
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


# --- failures ---


class Raises(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)  # the records arrive in the meantime
        if self.global_rank == 1 and self.global_step == 14:
            raise RuntimeError("this rank has had enough")
        return super().training_step(batch, batch_idx)


class CannotBeWritten(CommunicationMonitor):
    def _on_windows(self, trainer: Any, windows: Any) -> None:
        raise OSError("the disk is full")


def fail(directory: str) -> Any:
    train(CannotBeWritten(every_n_steps=4, plot=False), "ddp_ext", seeded(MLP))
    train(CommunicationMonitor(every_n_steps=4, dirpath=directory, plot=False), "ddp_ext", seeded(Raises))


@pytest.mark.processes
def test_a_failing_communication_monitor_causes_no_hang(tmp_path: Path) -> None:
    began = time.monotonic()
    first, second = outcomes_of_ranks(fail, str(tmp_path))
    assert time.monotonic() - began < 60
    assert "this rank has had enough" in (second.error or "")
    assert first.error is not None
    assert "CommunicationMonitor stops, and training continues: OSError: the disk is full" in first.output
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]  # the steps so far


# --- workers, Horovod, one process ---


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "devices"), [("ddp_spawn_ext", 2), ("dp_ext", 2), ("auto", 1)], ids=["workers", "dp", "one"]
)
def test_the_callback_of_the_user_has_the_results(
    strategy: str, devices: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = CommunicationMonitor(every_n_steps=4, plot=False)
    num_ranks = 2 if strategy == "ddp_spawn_ext" else 1
    with caplog.at_level(logging.INFO):
        train(monitor, strategy, seeded(MLP), devices=devices, default_root_dir=tmp_path)
    assert [times.rank for times in monitor.rank_times] == list(range(num_ranks))
    assert monitor.files == [tmp_path / "communication" / "trace.json"]
    assert monitor.files[0].exists()
    assert monitor.advice is not None
    if num_ranks == 1:
        assert monitor.rank_times[0].num_bytes == 0
        assert f"CommunicationMonitor: {monitor.advice} Timeline: {monitor.files[0]}." in caplog.text


def train_over_horovod(directory: str) -> list[Any]:
    found: list[Any] = []
    for name in (None, "a"):
        monitor = CommunicationMonitor(every_n_steps=4, dirpath=directory, plot=False) if name else None
        model = seeded(Wide)
        train(monitor, "horovod_ext", model, accumulate_grad_batches=2)
        found.append(state_of(model))
    assert monitor is not None
    return [*found, monitor.rank_times, num_bytes_of(model)]


@pytest.mark.processes
def test_exchanges_over_horovod_are_recorded(tmp_path: Path) -> None:
    for rank, (without, with_it, times, num_bytes) in enumerate(
        run_horovod("horovodrun", train_over_horovod, str(tmp_path))
    ):
        assert_same_bits(without, with_it)
        assert [each.rank for each in times] == ([] if rank else [0, 1])
        for each in times:
            assert each.num_bytes == num_bytes
            assert each.communication_ms > 0
            assert each.hidden_ms > 0
            parts = each.data_ms + each.forward_ms + each.backward_ms + each.exposed_ms + each.optimizer_ms
            assert each.step_ms == pytest.approx(parts + each.other_ms)
    assert {event["pid"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]} == {0, 1}


# --- rejected arguments ---


@pytest.mark.parametrize(
    ("arguments", "error", "expected_text"),
    [
        ({"every_n_steps": 0}, ValueError, "`every_n_steps=0` must be at least 1"),
        ({"every_n_steps": "9"}, TypeError, "`every_n_steps` must be a whole number, got '9'"),
        ({"observed_steps": 2.5}, TypeError, "`observed_steps` must be a whole number, got 2.5"),
        ({"dirpath": 3}, TypeError, "`dirpath` must be a path or None, got 3"),
        ({"plot": "no"}, TypeError, "`plot` must be True or False, got 'no'"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: Any, error: type[Exception], expected_text: str) -> None:
    with pytest.raises(error) as raised:
        CommunicationMonitor(**arguments)
    assert expected_text in str(raised.value)


def test_a_strategy_whose_exchanges_cannot_be_observed_is_refused() -> None:
    class Trainer:
        callbacks: ClassVar[list[Any]] = []
        strategy = FSDPStrategy()
        world_size = 2

    with pytest.raises(ValueError, match="cannot observe the exchanges of FSDPStrategy"):
        CommunicationMonitor().setup(Trainer(), MLP(), "fit")  # type: ignore[arg-type]


def test_a_second_monitor_is_refused() -> None:
    trainer = make_trainer("auto", devices=1, callbacks=[CommunicationMonitor(), CommunicationMonitor(5)])
    with pytest.raises(ValueError, match="`callbacks` contains more than one CommunicationMonitor"):
        trainer.fit(MLP(), loader())

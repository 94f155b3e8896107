"""After a stage of ``ddp_spawn_ext``, whatever the user reads, changes, saves or goes on with is as in one process.

With one device, everything must have the same bits as Lightning's own single process: the reference of these tests.
"""

import atexit
import os
import random
import signal
import threading
import time
from collections import OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_strategies_ext import DDPSpawnStrategy, ResultsError, WorkerRaisedError
from lightning_strategies_ext.launch import segments
from tests.ddp_spawn_trainers import Stateful, seeded, spawn_trainer
from tests.models import (
    LOADS_EVERYTHING,
    MLP,
    StatefulLoader,
    assert_same_bits,
    dataset,
    fit,
    loader,
    make_trainer,
    state_of,
)
from tests.ranks import run_ranks

#: With a sampler for several ranks, the order of the samples would not be that of one process.
ALONE: dict[str, Any] = {"devices": 1, "use_distributed_sampler": False}

# --- a second fit: the user's values count ---


class Configurable(MLP):
    """Makes its optimizer of what the user sets between two fits."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01
        self.kind: Any = torch.optim.Adam
        self.weight_decay = 0.0
        self.make_scheduler: Any = None

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        if self.make_scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": self.make_scheduler(optimizer, self), "interval": "step"}]


class KeepsOptimizer(MLP):
    """Returns the same optimizer and scheduler in each fit."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)

    def configure_optimizers(self):
        return [self.optimizer], [{"scheduler": self.scheduler, "interval": "step"}]


def one_cycle(optimizer: Any, module: Any) -> Any:
    steps = module.trainer.estimated_stepping_batches
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=int(steps))


def cosine(optimizer: Any, module: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def nothing(model: Any) -> None:
    pass


def change_rate(model: Any) -> None:
    model.lr = 1e-4


def change_decay(model: Any) -> None:
    model.weight_decay = 0.5


def change_optimizer(model: Any) -> None:
    model.kind = torch.optim.RMSprop


def change_schedule(model: Any) -> None:
    model.make_scheduler = cosine


def change_held_rate(model: Any) -> None:
    model.optimizer.param_groups[0]["lr"] = 1e-4


def use_one_cycle(model: Any) -> None:
    model.make_scheduler = one_cycle


def fit_twice(trainer: pl.Trainer, make_model: Any, first: Any, change: Any) -> Any:
    model = seeded(make_model)
    first(model)
    trainer.fit(model, loader())
    change(model)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, loader())
    return model


SECOND_FITS = [
    (Configurable, nothing, nothing),
    (Configurable, nothing, change_rate),
    (Configurable, nothing, change_decay),
    (Configurable, nothing, change_optimizer),
    (Configurable, nothing, change_schedule),
    (Configurable, use_one_cycle, change_schedule),
    (KeepsOptimizer, nothing, nothing),
    (KeepsOptimizer, nothing, change_held_rate),
]


@pytest.mark.parametrize(
    ("make_model", "first", "change"),
    SECOND_FITS,
    ids=lambda part: part.__name__,
)
def test_a_second_fit_is_that_of_one_process(make_model, first, change):
    trainers = [make_trainer(strategy, **ALONE, max_epochs=1) for strategy in ("auto", "ddp_spawn_ext")]
    theirs, ours = (fit_twice(trainer, make_model, first, change) for trainer in trainers)
    assert_same_bits(state_of(ours), state_of(theirs))
    (their_optimizer,), (our_optimizer,) = trainers[0].optimizers, trainers[1].optimizers
    assert our_optimizer.state_dict()["param_groups"] == their_optimizer.state_dict()["param_groups"]
    if make_model is KeepsOptimizer:
        assert our_optimizer is ours.optimizer
        assert trainers[1].lr_scheduler_configs[0].scheduler is ours.scheduler
        assert ours.scheduler.state_dict() == theirs.scheduler.state_dict()
        assert our_optimizer.state[next(ours.parameters())]["step"] == 48


def test_a_second_one_cycle_schedule_has_its_own_steps():
    models = []
    for strategy in ("auto", "ddp_spawn_ext"):
        model = seeded(Configurable)
        use_one_cycle(model)
        for _ in range(2):  # as in k-fold: a Trainer for each, the model goes on
            make_trainer(strategy, **ALONE, max_epochs=1).fit(model, loader())
        models.append(state_of(model))
    assert_same_bits(models[1], models[0])


def test_a_rate_that_is_set_after_lr_find_is_the_one_that_trains():
    found = {}
    for strategy in ("auto", "ddp_spawn_ext"):
        model = seeded(Configurable)
        trainer = make_trainer(strategy, **ALONE, max_epochs=1)
        finder = Tuner(trainer).lr_find(model, loader(), num_training=40)
        suggestion = finder.suggestion()
        assert model.lr == suggestion != 0.01
        model.lr = 0.05
        trainer.fit(model, loader())
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05
        found[strategy] = suggestion, state_of(model)
    assert found["ddp_spawn_ext"][0] == found["auto"][0]
    assert_same_bits(found["ddp_spawn_ext"][1], found["auto"][1])


# --- checkpoints of the main process ---


class HasEverything(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.steps_seen = 0
        self.metrics = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})
        self.metrics.persistent(True)
        self.register_buffer("average", torch.zeros(3))
        self.save_hyperparameters({"width": 16})

    def training_step(self, batch, batch_idx):
        self.steps_seen += 1
        loss = self.loss(batch)
        self.metrics.update(loss.detach())
        self.average += batch[0].mean()
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["steps_seen"] = self.steps_seen

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class HasState(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batches_seen = 0

    def train_dataloader(self):
        return StatefulLoader(dataset(), batch_size=4)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.batches_seen += 1
        return batch

    def state_dict(self):
        return {"batches_seen": self.batches_seen}

    def load_state_dict(self, state):
        self.batches_seen = state["batches_seen"]


class SavesInTheEnd(pl.Callback):
    """What the process that trains would save when the stage has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.save_checkpoint(self.path)


class StopsInTheMiddle(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 11:
            trainer.should_stop = True


def assert_same(ours: Any, theirs: Any, path: str = "checkpoint") -> None:
    """Fails at the first key that differs."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), path
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{path}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), path
        for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(our, their, f"{path}[{index}]")
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs), path
    else:
        assert ours == theirs, path


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_the_main_process_saves_what_the_worker_would(start_method, tmp_path):
    model, data = seeded(HasEverything), HasState()
    callbacks = [SavesInTheEnd(tmp_path / "theirs.ckpt"), StopsInTheMiddle()]
    trainer = spawn_trainer(f"ddp_{start_method}_ext", max_epochs=2, callbacks=callbacks)
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    ours, theirs = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("ours", "theirs"))
    assert ours["steps_seen"] == ours["HasState"]["batches_seen"] == 11
    assert ours["state_dict"]["metrics.mean.weight"] == 11
    assert ours["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"position": 3}]
    assert_same(ours, theirs)


def test_a_run_that_goes_on_from_the_main_process_checkpoint_repeats_no_sample(tmp_path):
    weights = {}
    for strategy in ("auto", "ddp_spawn_ext"):
        model, data = seeded(HasEverything), HasState()
        trainer = make_trainer(strategy, **ALONE, callbacks=[StopsInTheMiddle()])
        trainer.fit(model, datamodule=data)
        trainer.save_checkpoint(tmp_path / "middle.ckpt")
        model, data = HasEverything(), HasState()
        trainer = make_trainer(strategy, **ALONE)
        trainer.fit(model, datamodule=data, ckpt_path=tmp_path / "middle.ckpt", **LOADS_EVERYTHING)
        weights[strategy] = state_of(model)
        assert data.batches_seen == trainer.global_step
    assert_same_bits(weights["ddp_spawn_ext"], weights["auto"])


class Fails(HasEverything):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 5:
            raise RuntimeError("on purpose")
        return super().training_step(batch, batch_idx)


def test_what_is_saved_on_an_exception_has_everything(tmp_path):
    saved = {}
    for strategy in ("auto", "ddp_spawn_ext"):
        path = tmp_path / strategy
        trainer = make_trainer(
            strategy, **ALONE, enable_checkpointing=True, callbacks=[OnExceptionCheckpoint(path, "failed")]
        )
        with pytest.raises(Exception, match="on purpose"):
            trainer.fit(seeded(Fails), datamodule=HasState())
        saved[strategy] = torch.load(path / "failed.ckpt", weights_only=False)
        del saved[strategy]["callbacks"]  # the callbacks' keys hold their paths
    assert saved["auto"]["steps_seen"] == 5
    assert_same(saved["ddp_spawn_ext"], saved["auto"])


class AsksToStop(pl.Callback):
    """Sends a SIGTERM to the main process, as a scheduler does."""

    def __init__(self) -> None:
        self.main_pid = os.getpid()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 5 and trainer.is_global_zero:
            os.kill(self.main_pid, signal.SIGTERM)
        time.sleep(0.1)


def test_what_is_saved_after_a_sigterm_has_everything(tmp_path):
    model, data = seeded(HasEverything), HasState()
    callbacks = [SavesInTheEnd(tmp_path / "theirs.ckpt"), AsksToStop()]
    trainer = spawn_trainer(max_epochs=20, callbacks=callbacks)
    with pytest.raises(SIGTERMException):
        trainer.fit(model, datamodule=data)
    assert 5 <= trainer.global_step < 100
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    ours = torch.load(tmp_path / "ours.ckpt", weights_only=False)
    assert ours["global_step"] == ours["steps_seen"] == ours["HasState"]["batches_seen"] == trainer.global_step
    assert ours["state_dict"]["metrics.mean.weight"] == trainer.global_step
    positions = ours["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert positions == [{"position": trainer.fit_loop.epoch_loop.batch_progress.current.ready}]


# --- the user's objects ---


class Node:
    def __init__(self) -> None:
        self.values: list[int] = []
        self.me = self


class Frozen:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class HoldsObjects(pl.Callback):
    def __init__(self) -> None:
        self.node = Node()
        self.tensor = torch.zeros(3)
        self.array = np.zeros(3)
        self.nested = {"deep": [OrderedDict(a=[0]), defaultdict(list), deque([1], maxlen=3), {1}]}
        self.same = self.nested["deep"][0]
        self.metric = SumMetric()
        self.parameter = nn.Parameter(torch.zeros(2))
        self.queue = [Node(), Node()]
        self.unchanged = Node()
        self.random = random.Random(3)

    def on_train_batch_end(self, *args: Any) -> None:
        self.node.values.append(1)
        self.random.random()
        self.tensor += 1
        self.array += 1
        ordered, default, recent, numbers = self.nested["deep"]
        ordered["a"].append(1)
        default["x"].append(2)
        recent.append(len(recent))
        numbers.add(len(numbers) + 1)
        self.metric.update(1.0)
        self.parameter.data += 1
        if len(self.queue) > 1:
            self.queue.pop(0)
        self.queue[0].values.append(5)


@pytest.mark.parametrize(
    ("strategy", "more"),
    [("auto", None), ("ddp_spawn_ext", None), ("ddp_fork_ext", None), ("ddp_fork_ext", lambda: None)],
    ids=["one process", "sent", "sent to forked", "inherited"],
)
def test_objects_that_the_user_holds_are_updated(strategy, more):
    callback = HoldsObjects()
    callback.same["more"] = more
    callback.lock = lock = threading.Lock() if more else None
    node, tensor, array, ordered, metric = (
        callback.node,
        callback.tensor,
        callback.array,
        callback.same,
        callback.metric,
    )
    parameter, popped, kept = callback.parameter, *callback.queue
    default, recent, numbers = callback.nested["deep"][1:]
    make_trainer(strategy, **ALONE, max_epochs=1, limit_train_batches=3, callbacks=[callback]).fit(MLP(), loader())
    assert node is callback.node is node.me
    assert node.values == [1, 1, 1]
    assert tensor is callback.tensor
    assert tensor.tolist() == array.tolist() == [3, 3, 3]
    assert parameter is callback.parameter
    assert parameter.tolist() == [3, 3]
    assert ordered is callback.same is callback.nested["deep"][0]
    assert ordered["a"] == [0, 1, 1, 1]
    assert ordered["more"] is more
    assert callback.lock is lock
    expected = random.Random(3)
    _ = [expected.random() for _ in range(3)]
    assert callback.random.getstate() == expected.getstate()
    assert default == {"x": [2, 2, 2]}
    assert default["new"] == []
    assert list(recent) == [1, 2, 3]
    assert numbers == {1, 2, 3, 4}
    assert metric is callback.metric
    assert metric.compute() == 3
    assert callback.queue == [kept]
    assert (popped.values, kept.values) == ([], [5, 5, 5])


class HoldsData(MLP):
    """What is large and does not change must not travel back."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = torch.randn(1000, 100)
        self.table = np.random.rand(1000, 100)
        self.counts = torch.zeros(4)

    def training_step(self, batch, batch_idx):
        self.counts += 1
        return super().training_step(batch, batch_idx)


class Counts(pl.Callback):
    def __init__(self, samples: torch.Tensor) -> None:
        self.samples = samples


def test_what_has_not_changed_stays_where_it_is():
    model = HoldsData()
    samples, before = model.samples, model.samples.clone()
    addresses = samples.data_ptr(), model.table.ctypes.data
    trainer = spawn_trainer(max_epochs=1, limit_train_batches=2, callbacks=[callback := Counts(samples)])
    trainer.fit(model, loader())
    assert (model.samples.data_ptr(), model.table.ctypes.data) == addresses
    assert model.samples is samples is callback.samples
    assert torch.equal(samples, before)
    assert model.counts.tolist() == [2.0] * 4


class SwapsData(MLP):
    """Gives its layer, and a tensor, the memory of others that have not changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.zeros(3), torch.ones(3)
        self.best = torch.full((16,), 5.0)

    def on_train_end(self):
        self.first.data, self.second.data = self.second.data, self.first.data
        self.net[0].bias.data = self.best.data


def test_tensors_that_were_given_the_memory_of_others_come_back():
    model = SwapsData()
    first, bias = model.first, model.net[0].bias
    spawn_trainer(max_epochs=1, limit_train_batches=2).fit(model, loader())
    assert first is model.first
    assert (first.tolist(), model.second.tolist()) == ([1.0] * 3, [0.0] * 3)
    assert bias is model.net[0].bias
    assert bias.tolist() == [5.0] * 16


# --- layers that are known late ---


class Lazy(MLP):
    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))

    def configure_model(self):
        if any(nn.parameter.is_lazy(parameter) for parameter in self.parameters()):
            self.net(dataset().tensors[0])


def test_lazy_layers_come_back():
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


def test_parts_that_the_stage_removed_are_gone():
    states = []
    for strategy in ("auto", "ddp_spawn_ext"):
        model = seeded(Prunes)
        make_trainer(strategy, **ALONE, max_epochs=1).fit(model, loader())
        states.append(state_of(model))
    assert_same_bits(states[1], states[0])
    assert (states[1]["net.0.weight"] == 0).sum() > 50


def test_best_weights_of_a_checkpoint_are_those_of_one_process(tmp_path):
    paths = []
    for strategy in ("auto", "ddp_spawn_ext"):
        checkpoint = ModelCheckpoint(tmp_path / strategy, monitor="val_loss")
        trainer = make_trainer(strategy, **ALONE, callbacks=[checkpoint], enable_checkpointing=True)
        trainer.fit(seeded(Configurable), loader(), loader())
        paths.append(checkpoint.best_model_path)
    theirs, ours = (torch.load(path, weights_only=False)["state_dict"] for path in paths)
    assert_same_bits(ours, theirs)


# --- nothing is lost ---


class Unloadable:
    """Can be sent, and not be received."""

    def __reduce__(self):
        return fail_to_load, ()


def fail_to_load() -> None:
    raise ValueError("cannot be loaded here")


class PutsUnloadable(HasEverything):
    def add_to_queue(self, queue):
        queue.put(Unloadable())

    def get_from_queue(self, queue):
        queue.get()


class PutsUnpicklable(HasEverything):
    def add_to_queue(self, queue):
        queue.put(lambda: None if queue else (yield))
        queue.put(open(os.devnull))  # noqa: SIM115


class FailsToGet(HasEverything):
    def add_to_queue(self, queue):
        queue.put(1)

    def get_from_queue(self, queue):
        raise ValueError("not now")


@pytest.mark.parametrize("make_model", [PutsUnloadable, PutsUnpicklable, FailsToGet])
def test_a_run_whose_results_cannot_be_brought_back_is_saved_and_it_is_said_where(make_model, tmp_path):
    model, expected = seeded(make_model), seeded(HasEverything)
    spawn_trainer(max_epochs=1).fit(expected, loader())
    trainer = spawn_trainer(max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(ResultsError, match="is saved in") as caught:
        trainer.fit(model, loader())
    assert caught.value.__cause__ is not None
    (path,) = tmp_path.glob("not-brought-back-*.ckpt")
    assert str(path) in str(caught.value)
    checkpoint = torch.load(path, weights_only=False)
    assert checkpoint["steps_seen"] == 8
    assert_same_bits(checkpoint["state_dict"], state_of(expected))
    resumed = spawn_trainer(max_epochs=2)
    resumed.fit(HasEverything(), loader(), ckpt_path=path, **LOADS_EVERYTHING)
    assert resumed.global_step == 16


class RaisesFromC(MLP):
    def training_step(self, batch, batch_idx):
        error = ValueError("the real reason")
        if hasattr(error, "add_note"):
            error.add_note("  a note\nthat ends in: threading.py(1002): _bootstrap")
        raise error


def test_the_headline_of_a_failure_is_the_exception():
    with pytest.raises(WorkerRaisedError, match=r"^\W*rank \d \(pid \d+\) failed: ValueError: the real reason\n"):
        spawn_trainer().fit(RaisesFromC(), loader())


class HasLambda(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].choices = {"a": [1, lambda x: x]}


class IsParametrized(MLP):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.orthogonal(self.net[2])


class HasUnpicklable(pl.Callback):
    def __init__(self) -> None:
        self.node = Node()
        self.node.on_end = lambda: None


@pytest.mark.parametrize(
    ("make_model", "options", "said"),
    [
        (HasLambda, {}, r"`net\.1\.choices\['a'\]\[1\]` of the LightningModule HasLambda cannot be sent"),
        (IsParametrized, {}, r"`net\.2` of the LightningModule IsParametrized cannot be sent"),
        (MLP, {"callbacks": [HasUnpicklable()]}, r"`node\.on_end` of the callback HasUnpicklable cannot be sent"),
        (
            MLP,
            {"profiler": "pytorch"},
            r"`_profiler_kwargs\['schedule'\]\._schedule` of the profiler PyTorchProfiler cannot be sent",
        ),
    ],
)
def test_what_cannot_be_sent_is_named_by_its_path(make_model, options, said):
    with pytest.raises(TypeError, match=said):
        spawn_trainer(**options).fit(make_model(), loader())


def test_a_profiler_goes_through_several_stages_of_forked_workers(tmp_path):
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="profile")
    trainer, model = spawn_trainer("ddp_fork_ext", max_epochs=1, profiler=profiler), MLP()
    trainer.fit(model, loader())
    trainer.test(model, loader(), verbose=False)
    assert {path.name.split("-")[0] for path in tmp_path.glob("*.txt")} == {"fit", "test"}
    assert "test_step" in profiler.summary()


# --- workers ---


def workers_of_this_process() -> list[psutil.Process]:
    workers = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and "fork_server" in " ".join(process.cmdline()):
                workers.append(process)
    return workers


def test_a_search_over_many_trainers_has_the_workers_of_one():
    kept = []
    pids = set()
    for _ in range(4):
        model = MLP()
        trainer = spawn_trainer(max_epochs=1)
        trainer.fit(model, loader())
        pids.update(trainer.strategy.launcher.pids)
        kept.append((model, trainer))
    assert len(pids) == 2
    assert len(workers_of_this_process()) == 3  # and what they are forked from
    first = kept[0][1]
    first.fit_loop.max_epochs = 2
    first.fit(kept[0][0], loader())
    assert set(first.strategy.launcher.pids) == pids
    assert first.global_step == 16
    three = spawn_trainer(devices=3, max_epochs=1)
    three.fit(MLP(), loader())
    assert len(workers_of_this_process()) == 4
    assert not pids & set(three.strategy.launcher.pids)


def test_workers_that_are_taken_over_start_as_new_ones_do():
    expected = state_of(fit("ddp_spawn_ext", Stateful)[1])
    fit("ddp_spawn_ext", Configurable)
    assert_same_bits(state_of(fit("ddp_spawn_ext", Stateful)[1]), expected)


def test_workers_need_not_be_kept_and_can_be_closed():
    trainer, model = spawn_trainer(DDPSpawnStrategy(keep_workers=False), max_epochs=1), seeded(Stateful)
    trainer.fit(model, loader())
    assert trainer.strategy.launcher.pids == []
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    assert trainer.global_step == 16
    with DDPSpawnStrategy() as strategy:
        again, other = spawn_trainer(strategy, max_epochs=1), seeded(Stateful)
        again.fit(other, loader())
        strategy.close()
        assert strategy.launcher.pids == []
        again.fit_loop.max_epochs = 2
        again.fit(other, loader())
        pids = strategy.launcher.pids
        assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
    assert_same_bits(state_of(model), state_of(other))


class LeavesGroup(pl.Callback):
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        torch.distributed.destroy_process_group()


def fit_after_leaving_the_group() -> int:
    trainers = [make_trainer("ddp_ext", max_epochs=1, callbacks=[LeavesGroup()]) for _ in range(2)]
    for trainer in trainers:
        trainer.fit(MLP(), loader())
    return trainers[1].global_step


def test_a_stage_can_follow_where_the_user_has_left_the_process_group():
    trainer, model = spawn_trainer(max_epochs=1, callbacks=[LeavesGroup()]), MLP()
    trainer.fit(model, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    assert trainer.global_step == 16
    assert run_ranks(fit_after_leaving_the_group, timeout_s=100) == [8, 8]


def num_threads_and_exit_handler(path: str) -> int:
    atexit.register(Path(path).touch)
    return torch.get_num_threads()


def in_main(path: str) -> None:
    with Path(path).open("a") as file:
        file.write(str(os.getpid()))


@pytest.mark.parametrize(("start_method", "num_threads"), [("forkserver", 3), ("spawn", 3), ("fork", 1)])
def test_workers_run_their_exit_handlers_and_have_the_threads_that_were_asked_for(
    start_method, num_threads, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    atexit.register(in_main, str(tmp_path / "main"))
    try:
        with DDPSpawnStrategy(parallel_devices=[torch.device("cpu")] * 2, start_method=start_method) as strategy:
            assert strategy.spawn(num_threads_and_exit_handler, str(tmp_path / "ended")) == num_threads
            assert ("OMP_NUM_THREADS=3" in caplog.text) is (start_method == "fork")
            assert list(tmp_path.iterdir()) == []
    finally:
        atexit.unregister(in_main)
    assert [path.name for path in tmp_path.iterdir()] == ["ended"]


def test_large_data_that_has_not_changed_is_not_written_again_and_what_has_is(monkeypatch):
    written = []
    write = segments.Segment.write.__func__

    def noting(cls: Any, buffers: Any) -> Any:
        written.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        return write(cls, buffers)

    monkeypatch.setattr(segments.Segment, "write", classmethod(noting))
    model = HoldsLargeData()
    with DDPSpawnStrategy() as strategy:
        trainer = spawn_trainer(strategy, limit_test_batches=2)
        for _ in range(2):
            assert trainer.test(model, loader(), verbose=False)[0]["sum"] == model.samples.numel()
        assert max(written[:2]) >= model.samples.nbytes
        assert max(written[2:]) < 1 << 20
        model.samples.numpy()[0, 0] = 3  # as no version counter sees
        model.table[-1, -1] += 5
        metrics = trainer.test(model, loader(), verbose=False)[0]
        assert (metrics["sum"], metrics["table"]) == (model.samples.numel() + 2, model.table.size + 5)
        assert kept_by(strategy) == model.samples.nbytes + model.table.nbytes
        written.clear()
        other = spawn_trainer()
        other.test(model, loader(), verbose=False)
        assert max(written) < 1 << 20  # a Trainer that takes the workers over takes that over too
        assert (kept_by(strategy), kept_by(other.strategy)) == (0, model.samples.nbytes + model.table.nbytes)
    other.strategy.close()
    assert kept_by(other.strategy) == 0


def kept_by(strategy: DDPSpawnStrategy) -> int:
    return strategy.launcher.workers._kept.num_bytes


class HoldsLargeData(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.samples = torch.ones(1024, 1024)
        self.table = np.ones((1024, 512))

    def test_step(self, batch, batch_idx):
        self.log_dict({"sum": self.samples.sum(), "table": float(self.table.sum())})
        if self.global_rank == 1:
            self.samples.zero_()  # stays in this worker


class SlowToSend:
    """Takes its time to be sent back, and says that it is at it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        Path(self.path).touch()
        time.sleep(2)
        return str, (f"sent by {os.getpid()}",)


def test_workers_whose_results_are_on_their_way_are_not_taken_over(tmp_path):
    devices = [torch.device("cpu")] * 2
    path = tmp_path / "sending"
    with DDPSpawnStrategy(parallel_devices=devices) as one, DDPSpawnStrategy(parallel_devices=devices) as other:
        with ThreadPoolExecutor() as threads:
            first = threads.submit(one.spawn, SlowToSend, str(path))
            while not path.exists() and not first.done():
                time.sleep(0.02)
            pid = other.spawn(os.getpid)
            assert first.result() != f"sent by {pid}"
        assert first.result().startswith("sent by ")

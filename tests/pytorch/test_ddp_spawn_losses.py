"""``ddp_spawn_ext`` loses no results, and names objects that cannot be transferred."""

import os
import re
import signal
import threading
import time

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import Precision, TorchCheckpointIO
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_strategies_ext import DDPSpawnStrategy, ResultTransferError, WorkerRaisedError
from tests.support.ddp_spawn_trainers import HasEverything, Node, seeded, spawn_trainer
from tests.support.models import (
    LOADS_EVERYTHING,
    MLP,
    assert_same_bits,
    loader,
    state_of,
)


class Unloadable:
    """An object that can be pickled, but not unpickled."""

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


class FailsInGetFromQueue(HasEverything):
    def add_to_queue(self, queue):
        queue.put(1)

    def get_from_queue(self, queue):
        raise ValueError("not now")


@pytest.mark.processes
@pytest.mark.parametrize("make_model", [PutsUnloadable, PutsUnpicklable, FailsInGetFromQueue])
def test_results_that_cannot_be_transferred_are_saved_and_the_error_names_the_file(make_model, tmp_path):
    model, expected = seeded(make_model), seeded(HasEverything)
    spawn_trainer(max_epochs=1).fit(expected, loader())
    trainer = spawn_trainer(max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(ResultTransferError, match="is saved in") as caught:
        trainer.fit(model, loader())
    assert caught.value.__cause__ is not None
    (path,) = tmp_path.glob("rank-0-state-*.ckpt")
    assert str(path) in str(caught.value)
    checkpoint = torch.load(path, weights_only=False)
    assert checkpoint["steps_seen"] == 8
    assert_same_bits(checkpoint["state_dict"], state_of(expected))
    resumed = spawn_trainer(max_epochs=2)
    resumed.fit(HasEverything(), loader(), ckpt_path=path, **LOADS_EVERYTHING)
    assert resumed.global_step == 16


class IsInterrupted(HasEverything):
    """A model whose main process receives SIGINT several times during the transfer of the results."""

    times = 1

    def add_to_queue(self, queue):
        queue.put(1)

    def get_from_queue(self, queue):
        for _ in range(self.times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        self.received = queue.get()


@pytest.fixture
def ctrl_c_in_the_callback():
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)  # Lightning ignores further SIGINTs


@pytest.mark.processes
@pytest.mark.usefixtures("ctrl_c_in_the_callback")
def test_a_ctrl_c_while_results_are_received_takes_effect_afterwards(caplog):
    model, expected = seeded(IsInterrupted), seeded(HasEverything)
    spawn_trainer(max_epochs=1).fit(expected, loader())
    trainer = spawn_trainer(max_epochs=1)
    with pytest.raises(SystemExit):
        trainer.fit(model, loader())
    assert "Press Ctrl-C again" in caplog.text
    assert trainer.interrupted
    assert trainer.strategy.launcher.pids == []
    assert trainer.global_step == model.steps_seen == 8
    assert model.received == 1
    assert_same_bits(state_of(model), state_of(expected))
    assert trainer.optimizers[0].state


@pytest.mark.processes
@pytest.mark.usefixtures("ctrl_c_in_the_callback")
def test_a_second_ctrl_c_while_results_are_received_discards_them():
    model, trainer = seeded(IsInterrupted), spawn_trainer(max_epochs=1)
    model.times = 2
    with pytest.raises(SystemExit):
        trainer.fit(model, loader())
    assert not hasattr(model, "received")
    assert trainer.strategy.launcher.pids == []


class RaisesFromC(MLP):
    def training_step(self, batch, batch_idx):
        error = ValueError("\nthe real reason\nand what it means")
        if hasattr(error, "add_note"):
            error.add_note("  a note\nthat ends in: threading.py(1002): _bootstrap")
        raise error


@pytest.mark.processes
def test_the_headline_of_a_failure_is_the_exception():
    with pytest.raises(ValueError, match="the real reason") as raised:
        spawn_trainer().fit(RaisesFromC(), loader())
    headline = r"\W*rank \d \(pid \d+\) failed: ValueError: the real reason\n"
    assert re.match(headline, str(raised.value.__cause__))


class HasLockInside(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].choices = {"a": [1, threading.Lock()]}


class HasUnpicklable(pl.Callback):
    def __init__(self) -> None:
        self.node = Node()
        self.node.on_end = threading.Lock().release


class HasLock(TorchCheckpointIO):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class IsNotPrecise(Precision):
    def __init__(self) -> None:
        lock = threading.Lock()
        self.on_step = lambda: lock


class HasLockInProfile(SimpleProfiler):
    def __init__(self) -> None:
        super().__init__()
        self.options = {"lock": threading.Lock()}


class Slotted:
    __slots__ = ("function",)


class HasSlots(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.slotted = Slotted()
        self.slotted.function = threading.Lock()


@pytest.mark.parametrize(
    ("make_model", "options", "expected_text"),
    [
        (HasLockInside, {}, r"`net\.1\.choices\['a'\]\[1\]` of the LightningModule HasLockInside cannot be sent"),
        (MLP, {"callbacks": [HasUnpicklable()]}, r"`node\.on_end` of the callback HasUnpicklable cannot be sent"),
        (
            MLP,
            {"profiler": HasLockInProfile()},
            r"`options\['lock'\]` of the profiler HasLockInProfile cannot be sent",
        ),
        (
            MLP,
            {"strategy": DDPSpawnStrategy(ddp_comm_state=threading.Lock(), ddp_comm_hook=allreduce_hook)},
            r"`_gradient_sync\.comm_state` of the strategy DDPSpawnStrategy cannot be sent",
        ),
        (
            MLP,
            {"strategy": DDPSpawnStrategy(checkpoint_io=HasLock())},
            r"`lock` of the checkpoint plugin HasLock cannot be sent",
        ),
        (MLP, {"plugins": [IsNotPrecise()]}, r"`on_step` of the precision plugin IsNotPrecise cannot be sent"),
        (HasSlots, {}, r"`slotted\.function` of the LightningModule HasSlots cannot be sent"),
    ],
)
def test_an_error_has_the_path_of_an_object_that_cannot_be_sent(make_model, options, expected_text):
    with pytest.raises(TypeError, match=expected_text):
        spawn_trainer(**options).fit(make_model(), loader())


def test_an_error_has_the_path_of_a_trainer_attribute_that_cannot_be_sent():
    trainer = spawn_trainer()
    trainer.notes = {"a": threading.Lock()}
    with pytest.raises(TypeError, match=r"`notes\['a'\]` of the Trainer cannot be sent"):
        trainer.fit(MLP(), loader())


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp_spawn_ext", "ddp_fork_ext"])
def test_a_profiler_works_in_several_stages(strategy, tmp_path):
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="profile")
    trainer, model = spawn_trainer(strategy, max_epochs=1, profiler=profiler), MLP()
    trainer.fit(model, loader())
    trainer.test(model, loader(), verbose=False)
    assert {path.name.split("-")[0] for path in tmp_path.glob("*.txt")} == {"fit", "test"}
    assert "test_step" in profiler.summary()


class NeedsArgument:
    """An object that can be pickled, but not rebuilt."""

    def __new__(cls, value: int) -> "NeedsArgument":
        return object.__new__(cls)

    def __init__(self, value: int) -> None:
        self.value = value


REGISTRY = {}


class InRegistry:
    """An object that only the process that created it can look up."""

    def __init__(self) -> None:
        self.value = 0
        REGISTRY["only here"] = self

    def __reduce__(self):
        return find, ("only here",)


def find(name: str) -> object:
    return REGISTRY[name]


class HoldsUnreadable(MLP):
    def __init__(self, obj, steps=0) -> None:
        super().__init__()
        self.net[1].choices = {"first": 1, "a": obj}
        self.steps = steps

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.net[1].choices["a"].value += 1
        return super().training_step(batch, batch_idx)


class CallbackHoldsUnreadable(pl.Callback):
    def __init__(self) -> None:
        self.lazy_object = NeedsArgument(3)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("make_model", "callbacks", "expected_text"),
    [
        (
            lambda: HoldsUnreadable(NeedsArgument(0)),
            [],
            r"`net\.1\.choices\.a` of the LightningModule HoldsUnreadable cannot be rebuilt.*missing 1 required",
        ),
        (
            lambda: HoldsUnreadable(InRegistry()),
            [],
            r"`net\.1\.choices\.a` of the LightningModule HoldsUnreadable cannot be rebuilt.*KeyError: 'only here'",
        ),
        (MLP, [CallbackHoldsUnreadable()], r"`lazy_object` of the callback CallbackHoldsUnreadable cannot be rebuilt"),
    ],
)
def test_an_error_has_the_path_of_an_object_that_a_worker_cannot_rebuild(make_model, callbacks, expected_text):
    # The error of one worker, if the other was so slow that it was ended before it could raise the same error.
    errors = (TypeError, WorkerRaisedError)
    with pytest.raises(errors, match=f"(?s){expected_text}.*'ddp_fork_ext'") as caught:
        spawn_trainer(callbacks=callbacks, max_epochs=1).fit(make_model(), loader())
    assert isinstance(caught.value, TypeError) or isinstance(caught.value.__cause__, TypeError)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["NeedsArgument", "InRegistry"])
def test_forked_workers_inherit_what_cannot_be_rebuilt(kind):
    unreadable = NeedsArgument(0) if kind == "NeedsArgument" else InRegistry()
    trainer, model = spawn_trainer("ddp_fork_ext", max_epochs=1), HoldsUnreadable(unreadable)
    trainer.fit(model, loader())
    assert (model.steps, unreadable is model.net[1].choices["a"]) == (8, True)
    assert unreadable.value == (8 if kind == "NeedsArgument" else 0)
    trainer.test(model, loader(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    assert model.steps == 16

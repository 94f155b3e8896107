"""Shared objects remain shared with the workers of ``ddp_spawn_ext``: memory, locks, events, queues."""

import multiprocessing
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.support.ddp_spawn_trainers import seeded, spawn_trainer
from tests.support.models import NUM_CLASSES, NUM_FEATURES, WithBatchNorm, assert_same_bits, loader, state_of

pytestmark = pytest.mark.processes

SIZE = 16


def in_shared_memory(*shape: int) -> Tensor:
    return torch.zeros(*shape).share_memory_()


class Cached(Dataset):
    """A dataset that loads each sample once, in any process."""

    def __init__(self) -> None:
        self.cache, self.num_loads = in_shared_memory(SIZE, NUM_FEATURES), in_shared_memory(SIZE)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not self.num_loads[index]:
            self.cache[index] = torch.arange(NUM_FEATURES) + index
            self.num_loads[index] += 1
        return self.cache[index].clone(), torch.tensor(index % NUM_CLASSES)


class Counts(WithBatchNorm):
    """A model that counts in shared memory, which is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = in_shared_memory(2)

    def training_step(self, batch, batch_idx):
        self.num_steps[self.global_rank] += 1
        return super().training_step(batch, batch_idx)


class Records(pl.Callback):
    """A callback that writes on each rank to memory of all processes, and to memory that the worker creates."""

    def __init__(self, more: Any = None) -> None:
        self.ranks = {"seen": in_shared_memory(2)}
        self.made: Any = None
        self.more = more

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.ranks["seen"][trainer.global_rank] += 1
        self.made = in_shared_memory(1)


@pytest.mark.parametrize(
    ("strategy", "more", "num_workers"),
    [("ddp_spawn_ext", None, 0), ("ddp_spawn_ext", None, 2), ("ddp_fork_ext", None, 0), ("ddp_fork_ext", "a lock", 2)],
    ids=["sent", "sent, loader's workers", "sent to forked", "inherited"],
)
def test_tensors_in_shared_memory_stay_shared(strategy, more, num_workers):
    data, model, records = Cached(), Counts(), Records(multiprocessing.Lock() if more else None)
    before = data.cache, data.num_loads, model.num_steps, records.ranks["seen"]
    data_loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=num_workers)
    trainer = spawn_trainer(strategy, callbacks=[records], max_epochs=3)
    trainer.fit(model, data_loader)
    assert data.num_loads.tolist() == [1] * SIZE
    assert data.cache[:, 0].tolist() == list(range(SIZE))
    assert model.num_steps.tolist() == [12, 12]
    assert records.ranks["seen"].tolist() == [1, 1]
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, data_loader)
    assert data.num_loads.tolist() == [1] * SIZE
    assert model.num_steps.tolist() == [16, 16]
    assert records.ranks["seen"].tolist() == [2, 2]
    after = data.cache, data.num_loads, model.num_steps, records.ranks["seen"]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert all(tensor.is_shared() for tensor in (*after, records.made))


@pytest.mark.parametrize("more", [None, "a lock"], ids=["sent", "inherited"])
def test_ranks_train_copies_of_a_model_in_shared_memory(more):
    strategy = "ddp_fork_ext" if more else "ddp_spawn_ext"
    models = [seeded(WithBatchNorm), seeded(WithBatchNorm).share_memory()]
    weights = list(models[1].parameters())
    addresses = [weight.data_ptr() for weight in weights]
    for model in models:
        callback = Records(multiprocessing.Lock() if more else None)
        spawn_trainer(strategy, callbacks=[callback], max_epochs=1).fit(model, loader())
    assert_same_bits(*map(state_of, models))
    assert [weight.data_ptr() for weight in weights] == addresses
    assert all(weight.is_shared() for weight in models[1].parameters())


class Signals(pl.Callback):
    """A callback that uses one object of each kind from multiprocessing."""

    def __init__(self, context: Any) -> None:
        self.total, self.sums, self.raw = context.Value("i", 0), context.Array("d", 2), context.RawArray("i", 2)
        self.lock, self.event, self.queue = context.Lock(), context.Event(), context.Queue()
        self.reader, self.writer = context.Pipe(duplex=False)
        self.state = {"event": self.event, "num_steps": 0}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        with self.total.get_lock():
            self.total.value += 1
        with self.lock:
            self.sums[trainer.global_rank] += 0.5
        self.raw[trainer.global_rank] += 1
        self.state["num_steps"] += 1

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.queue.put(trainer.global_rank)
        if trainer.is_global_zero:
            self.event.set()
            self.writer.send("done")


@pytest.mark.parametrize(
    ("strategy", "method"), [("ddp_spawn_ext", "spawn"), ("ddp_fork_ext", "spawn"), ("ddp_fork_ext", "fork")]
)
def test_ranks_use_objects_of_multiprocessing(strategy, method):
    callback = Signals(multiprocessing.get_context(method))
    before = dict(vars(callback))
    trainer = spawn_trainer(strategy, callbacks=[callback], max_epochs=1, limit_train_batches=3)
    trainer.fit(WithBatchNorm(), loader())
    assert (callback.total.value, list(callback.sums), list(callback.raw)) == (6, [1.5, 1.5], [3, 3])
    assert sorted(callback.queue.get(timeout=60) for _ in range(2)) == [0, 1]
    assert callback.event.is_set()
    assert callback.reader.recv() == "done"
    assert callback.state == {"event": callback.event, "num_steps": 3}
    assert all(getattr(callback, name) is value for name, value in before.items())


@pytest.mark.parametrize("name", ["Value", "Event", "Queue"])
def test_an_object_that_only_forked_processes_can_have_is_named(name):
    context = multiprocessing.get_context("fork")
    callback = pl.Callback()
    callback.shared = {"of all": context.Value("i") if name == "Value" else getattr(context, name)()}
    with pytest.raises(
        TypeError, match=r"^`shared\['of all'\]` of the callback .* `multiprocessing.get_context\('spawn"
    ):
        spawn_trainer(callbacks=[callback]).fit(WithBatchNorm(), loader())

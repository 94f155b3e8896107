"""Trains with each strategy, and counts the Python calls of its training steps, see :mod:`.profiler`.

    python -m tests.guards.steps DIRECTORY START

``START`` is one of :data:`STARTS`, except "ranks". Each rank writes to ``DIRECTORY``, for each training, the calls of
:data:`NUM_WINDOWS` windows. A window is one optimizer step, or one period where an algorithm exchanges models once per
period. It begins where the Trainer calls ``on_train_batch_start``, and so includes the loop itself.

The counts do not depend on the load of the machine:

- A rank that waits for another rank in a collective calls more functions than a rank that does not wait. Therefore, in
  each window one rank is late: it enters a collective only after all threads of the other ranks have gone to sleep. For
  each rank, only the windows in which it is late are written. The ranks take turns.
- A window ends after the other threads of the process have gone to sleep. Their calls belong to this window.
- Garbage is not collected during the windows, because a collection calls finalizers of arbitrary objects.
- The failure monitor's threads are not counted.
- The windows contain nothing that happens once in a number of seconds or steps: no logger, no progress bar, no
  checkpoint, and no commit of elastic training, which has one per 100 steps.
"""

import contextlib
import gc
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from lightning_strategies_ext import DDPStrategy, DiLoCo, LocalSGD
from tests.guards.profiler import Profiler
from tests.support.models import MLP, NUM_CLASSES, NUM_FEATURES, loader, make_trainer

#: Number of first windows that do not count, in which buckets, caches, and compressions are initialized.
NUM_WARMUP_WINDOWS = 16
NUM_WINDOWS = 12
BATCH_SIZE = 4
_NUM_RANKS = 2
#: Seconds to wait until other threads and ranks sleep. After that, the number of calls may differ.
_LATEST_S = 5.0
#: The methods of torch's process groups that a strategy may call in a step.
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "gather", "scatter", "allgather"),
    *("_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)

#: Ranks that tests.support.ranks starts; a program whose strategies start workers or threads; one whose strategies
#: start ranks of Horovod; ranks that torchrun starts.
Start = Literal["ranks", "workers", "horovod", "torchrun"]
STARTS: tuple[Start, ...] = get_args(Start)

_profiler = Profiler()


# --- what is trained ---


@dataclass(frozen=True)
class Case:
    """The options of a step.

    Attributes:
        logs_metric: Whether the step averages a value over the ranks: ``self.log(..., sync_dist=True)``.
        accumulate: Batches per optimizer step.
    """

    logs_metric: bool = False
    accumulate: int = 1


CASES = {"plain": Case(), "metric": Case(logs_metric=True), "accumulating": Case(accumulate=2)}


@dataclass(frozen=True)
class Contender:
    """A strategy whose steps are counted.

    Attributes:
        name: Registered name, and further arguments; the key in the record.
        start: Program that trains with it, see :data:`STARTS`.
        strategy: Registered name, or a function that creates the strategy.
        is_fabric: Whether it is trained under Fabric, and not the Trainer.
        period: Optimizer steps per window.
        is_streamed: Whether the number of batches is unknown.
    """

    name: str
    start: Start
    strategy: Any
    is_fabric: bool = False
    period: int = 1
    is_streamed: bool = False

    def make_strategy(self) -> Any:
        """Returns the argument ``strategy`` of the front end."""
        return self.strategy if isinstance(self.strategy, str) else self.strategy()


def _joining() -> Any:
    return DDPStrategy(uneven_inputs="join")


CONTENDERS = (
    Contender("ddp_ext", "ranks", "ddp_ext"),
    Contender("ddp_ext_find_unused_parameters_true", "ranks", "ddp_ext_find_unused_parameters_true"),
    Contender("ddp_ext, uneven_inputs='join'", "ranks", _joining),
    Contender("ddp_ext, uneven_inputs='join', streamed", "ranks", _joining, is_streamed=True),
    Contender("ddp_ext_bf16", "ranks", "ddp_ext_bf16"),
    Contender("ddp_ext_powersgd", "ranks", "ddp_ext_powersgd"),
    Contender("ddp_ext_topk", "ranks", "ddp_ext_topk"),
    Contender("ddp_ext_localsgd, period=2", "ranks", lambda: DDPStrategy(compression=LocalSGD(period=2)), period=2),
    Contender("ddp_ext_diloco, period=2", "ranks", lambda: DDPStrategy(compression=DiLoCo(period=2)), period=2),
    Contender("Fabric: ddp_ext", "ranks", "ddp_ext", is_fabric=True),
    Contender("Fabric: ddp_ext_bf16", "ranks", "ddp_ext_bf16", is_fabric=True),
    Contender("ddp_spawn_ext", "workers", "ddp_spawn_ext"),
    Contender("ddp_fork_ext", "workers", "ddp_fork_ext"),
    Contender("ddp_spawn_elastic_ext", "workers", "ddp_spawn_elastic_ext"),
    Contender("Fabric: ddp_spawn_ext", "workers", "ddp_spawn_ext", is_fabric=True),
    Contender("dp_ext", "workers", "dp_ext"),
    Contender("Fabric: dp_ext", "workers", "dp_ext", is_fabric=True),
    Contender("horovod_ext", "horovod", "horovod_ext"),
    Contender("Fabric: horovod_ext", "horovod", "horovod_ext", is_fabric=True),
    Contender("ddp_elastic_ext", "torchrun", "ddp_elastic_ext"),
)


class Net(MLP):
    """A small net whose step has the options of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.logs_metric = case.logs_metric

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.logs_metric:
            self.log("loss", loss, sync_dist=True)
        return loss


class Stream(IterableDataset):
    """The batches of a dataset, without a length."""

    def __init__(self, num_samples: int) -> None:
        self.samples = list(loader(num_samples).dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def train_all(start: Start, directory: str) -> None:
    """Trains with all strategies of a start. Runs on each of its ranks."""
    for contender, case in itertools.product(CONTENDERS, CASES):
        if contender.start == start:
            train(contender, case, directory)


def train(contender: Contender, case_name: str, directory: str) -> None:
    """Trains with one strategy and counts the calls of the steps."""
    _profiler.install()
    pl.seed_everything(11, verbose=False)
    case = CASES[case_name]
    counter = StepCounter(f"{contender.name}.{case_name}", directory, case.accumulate * contender.period)
    if contender.is_fabric:
        _train_under_fabric(contender, case, counter)
        return
    trainer = make_trainer(
        contender.make_strategy(),
        callbacks=[counter],
        max_epochs=1,
        limit_train_batches=counter.num_batches,
        accumulate_grad_batches=case.accumulate,
        log_every_n_steps=1000,
    )
    num_samples = counter.num_batches * BATCH_SIZE * _NUM_RANKS
    data: Any = DataLoader(Stream(num_samples), BATCH_SIZE) if contender.is_streamed else loader(num_samples)
    trainer.fit(Net(case), data)


def _train_under_fabric(contender: Contender, case: Case, counter: "StepCounter") -> None:
    fabric = Fabric(strategy=contender.make_strategy(), devices=_NUM_RANKS, accelerator="cpu")
    fabric.launch(_train_in_loop, case, counter)


def _train_in_loop(fabric: Fabric, case: Case, counter: "StepCounter") -> None:
    net = MLP().net
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    features, labels = torch.randn(BATCH_SIZE, NUM_FEATURES), torch.arange(BATCH_SIZE) % NUM_CLASSES
    counter.prepare(fabric.global_rank, fabric.world_size)
    for batch_idx in range(counter.num_batches):
        counter.reach_batch(batch_idx)
        is_last = (batch_idx + 1) % case.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = functional.cross_entropy(model(features), labels)
            fabric.backward(loss)
        if case.logs_metric:
            fabric.all_reduce(loss.detach(), reduce_op="mean")
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    counter.write()


# --- how it is counted ---


class StepCounter(pl.Callback):
    """A callback that counts the calls of one rank's steps; the Trainer calls it as a callback.

    Args:
        name: Name of the training, and of the files.
        directory: Directory of the files.
        batches_per_window: Batches per window.
    """

    def __init__(self, name: str, directory: str, batches_per_window: int) -> None:
        self.num_batches = (NUM_WARMUP_WINDOWS + NUM_WINDOWS) * batches_per_window + 2
        self._name = name
        self._directory = directory
        self._batches_per_window = batches_per_window
        self._rank, self._num_ranks = 0, 1
        self._lateness: Lateness | None = None
        self._result: list[Any] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Installs the profiler in a worker, which unpickles this object before it connects to the other ranks."""
        self.__dict__.update(state)
        _profiler.install()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.prepare(trainer.global_rank, trainer.world_size)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.reach_batch(batch_idx)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.write()

    def prepare(self, rank: int, num_ranks: int) -> None:
        """Prepares this rank; collective."""
        self._rank, self._num_ranks = rank, num_ranks
        marks = Path(self._directory, f"{self._name}.began")
        self._lateness = Lateness(marks) if dist.is_initialized() else None

    def reach_batch(self, batch_idx: int) -> None:
        """Begins and ends windows before a batch."""
        window, rest = divmod(batch_idx, self._batches_per_window)
        window -= NUM_WARMUP_WINDOWS
        if rest or not 0 <= window <= NUM_WINDOWS:
            return
        with _profiler.paused():
            _wait_until(_other_threads_sleep)
            if self._lateness is not None:
                self._lateness.begin(window)
        if window == 0:
            gc.disable()
            _profiler.begin()
        elif window < NUM_WINDOWS:
            _profiler.begin_next()
        else:
            windows = _profiler.end()
            gc.enable()
            # In the other windows, this rank may have waited for another rank.
            self._result = [(own.totals, own.functions) for own in windows[self._rank :: self._num_ranks]]

    def write(self) -> None:
        """Writes the windows of this rank."""
        assert self._result, f"{self._name}: the training had no window"
        if self._lateness is not None:
            self._lateness.close()
            self._lateness = None
        Path(self._directory, f"{self._name}.{self._rank}.json").write_text(json.dumps(self._result))


class Lateness:
    """A delay that makes this rank enter collectives of torch.distributed last, in each window in which it is late.

    Collective: each rank creates one.

    Args:
        marks: Directory in which the ranks mark that they have begun a window. Before that, they may sleep for another
            reason than a collective.
    """

    def __init__(self, marks: Path) -> None:
        pids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        self._rank = dist.get_rank()
        self._others = {rank: pid for rank, pid in enumerate(pids) if rank != self._rank}
        self._marks = marks
        self._marks.mkdir(exist_ok=True)
        self._window = 0
        self._is_late = False
        self._group_class: Any = type(dist.group.WORLD)
        self._originals = {
            name: vars(self._group_class)[name] for name in _COLLECTIVES if name in vars(self._group_class)
        }
        assert self._originals, f"{self._group_class} has no collectives written in Python"
        for name, original in self._originals.items():
            setattr(self._group_class, name, self._delayed(original))

    def begin(self, window: int) -> None:
        """Begins a window."""
        (self._marks / f"{window}.{self._rank}").touch()
        self._window = window
        self._is_late = window < NUM_WINDOWS and window % (len(self._others) + 1) == self._rank

    def close(self) -> None:
        """Restores the process group."""
        for name, original in self._originals.items():
            setattr(self._group_class, name, original)

    def _delayed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(*args: Any, **kwargs: Any) -> Any:
            if self._is_late:
                with _profiler.paused():
                    _wait_until(self._other_ranks_sleep)
            return original(*args, **kwargs)

        return delayed

    def _other_ranks_sleep(self) -> bool:
        return all(
            (self._marks / f"{self._window}.{rank}").exists() and _sleep(Path(f"/proc/{pid}/task").iterdir())
            for rank, pid in self._others.items()
        )


def _other_threads_sleep() -> bool:
    """Returns whether all other threads of this process sleep."""
    own = str(threading.get_native_id())
    return _sleep(task for task in Path("/proc/self/task").iterdir() if task.name != own)


def _sleep(tasks: Iterable[Path]) -> bool:
    """Returns whether threads sleep, given their directories in /proc. A thread that has exited counts as asleep."""
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (task / "stat").read_text().rpartition(")")[2].split()[0] not in ("S", "I"):
                return False
    return True


def _wait_until(is_so: Callable[[], bool]) -> None:
    """Waits until a condition holds twice in a row: a thread may sleep for an instant, until it has the GIL."""
    latest = time.monotonic() + _LATEST_S
    num_times = 0
    while num_times < 2 and time.monotonic() < latest:
        time.sleep(3e-4)
        num_times = num_times + 1 if is_so() else 0


def main() -> None:
    """Runs in each process of a start."""
    directory, start = sys.argv[1:]
    torch.set_num_threads(1)
    train_all(start, directory)  # type: ignore[arg-type]


if __name__ == "__main__":
    # Workers unpickle the classes of this module by the name of the module, not by the name of the program.
    from tests.guards.steps import main as main_of_module

    main_of_module()

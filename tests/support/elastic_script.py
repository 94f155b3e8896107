"""A user's script that trains on digits with elastic ranks, and calls functions of a test that inject faults.

    def kill_rank_1(net, at):
        if at == "train" and net.global_rank == 1 and net.global_step >= 70 and net.first("kill"):
            kill(net)

    write_plan(directory, Plan(num_ranks=2, started_by="spawn", faults=[kill_rank_1]))
    python -m tests.support.elastic_script DIRECTORY

Each rank calls these functions in "setup", in "train" before a step, in "commit" and in "validation". They are at the
top level of a module. Each process writes a file into the directory, with a line for each batch that counts.
:mod:`.elastic_runs` starts this script and reads the files.
"""

import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

import lightning_strategies_ext as ext
from tests.support.examples import read_digits
from tests.support.shared_gpu import pass_for_own_host

NUM_TRAINED = 1437
NUM_EPOCHS = 4


@dataclass
class Plan:
    """The behavior of the script. Callbacks are given by the names of their classes, with arguments."""

    num_ranks: int  # at the start
    started_by: str  # "horovodrun", "torchrun", "spawn" or "ray"
    faults: Sequence["Fault"] = ()
    strategy: dict[str, Any] = field(default_factory=dict)  # arguments
    trainer: dict[str, Any] = field(default_factory=dict)  # arguments
    policy: dict[str, dict[str, Any]] = field(default_factory=dict)  # callbacks of this package
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)  # callbacks of Lightning
    pause_s: float = 0.0  # added to each training step
    validation_pause_s: float = 0.0  # added to each validation step
    pauses_in: Sequence[int] | None = None  # sizes of the worlds with pauses; None: the size at the start
    num_workers: int = 0  # of the DataLoader
    is_manual: bool = False  # manual optimization
    unfreezes_at: int | None = None  # epoch before which the first layers are frozen
    ckpt_path: str | None = None
    again: bool = False  # whether `validate` and a second `fit` follow
    is_on_one_gpu: bool = False  # whether all ranks share the first GPU


def write_plan(directory: Path, plan: Plan) -> None:
    """Writes a plan into the directory of the script."""
    (directory / "plan").write_bytes(pickle.dumps(plan))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns the training set and the validation set: images, labels, and numbers of samples."""
    images, labels = map(torch.from_numpy, read_digits())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = order[:NUM_TRAINED], order[NUM_TRAINED:]
    trained, held_out = (TensorDataset(images[p].float() / 16, labels[p], torch.arange(len(p))) for p in parts)
    return trained, held_out


class Net(pl.LightningModule):
    """A convolutional network that logs and counts its samples, and calls the faults of its plan."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()),
            *(nn.Conv2d(12, 24, 3, stride=2), nn.BatchNorm2d(24), nn.ReLU()),
            *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(216, 10)),
        )
        self.counted = SumMetric()
        self.directory, self.plan = directory, plan
        self.number: int | None = None
        self.lr = 4e-3
        self.num_batches = 0
        self.automatic_optimization = not plan.is_manual

    # --- for faults ---

    @property
    def size(self) -> int:
        """Number of ranks in this world."""
        return self.trainer.world_size

    @property
    def is_replacement(self) -> bool:
        """Whether this process replaces a lost rank."""
        return self.number is not None and self.number >= self.plan.num_ranks

    def first(self, name: str) -> bool:
        """Returns whether this is the first call with this name in all processes of the run."""
        try:
            (self.directory / f"mark {name}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def has_happened(self, name: str) -> bool:
        """Returns whether a process has called :meth:`first` with this name."""
        return (self.directory / f"mark {name}").exists()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition that other processes fulfill."""
        while not condition():
            time.sleep(0.01)

    def has_been_smaller(self) -> bool:
        """Returns whether the other ranks have continued without a lost rank."""
        written = "".join(path.read_text() for path in self.directory.glob("process*"))
        return any(f'"world": {size},' in written for size in range(1, self.plan.num_ranks))

    def write_line(self, **values: Any) -> None:
        with (self.directory / f"process{os.getpid()}").open("a") as file:
            print(json.dumps({"time": time.time(), "rank": self.global_rank, **values}), file=file)

    # --- the user's model ---

    def configure_callbacks(self) -> list[pl.Callback]:
        if self.plan.is_on_one_gpu:
            pass_for_own_host()
        return []

    def inject(self, at: str) -> None:
        for function in self.plan.faults:
            function(self, at)

    def pause(self, seconds: float) -> None:
        if self.size in (self.plan.pauses_in or [self.plan.num_ranks]):
            time.sleep(seconds)

    def setup(self, stage: str) -> None:
        if self.number is None:
            self.number = next(number for number in count() if self.first(f"process {number}"))
        self.inject("setup")

    def on_train_start(self) -> None:
        self.num_batches = 0
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        batch = 0 if progress.is_last_batch else progress.current.completed
        epoch = self.trainer.fit_loop.epoch_progress.current.processed
        world = {"world": self.size, "slot": self.trainer.local_rank}
        self.write_line(**world, epoch=epoch, batch=batch, step=self.trainer.global_step)
        if self.trainer.accumulate_grad_batches > 1:
            # The first batch is local: without the barrier, its line could precede the line with which rank 0 begins.
            self.trainer.strategy.barrier()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.pause(self.plan.pause_s)
        self.inject("train")
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("loss_of_all", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.counted(len(batch[1]))
        self.log("counted", self.counted, on_epoch=True, on_step=False)
        self.log("seen", float(len(batch[1])), on_epoch=True, on_step=False, reduce_fx="sum", sync_dist=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.num_batches += 1
        if not self.trainer.strategy.is_shadowing:
            self.write_line(epoch=self.current_epoch, batch=batch_idx, samples=batch[2].tolist())

    def on_train_epoch_end(self) -> None:
        if not self.automatic_optimization:
            self.lr_schedulers().step()
        logged = {name: float(self.trainer.callback_metrics[name]) for name in ("seen", "counted", "loss_epoch")}
        self.write_line(epoch=self.current_epoch, **logged)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            if batch_idx == 1:
                self.inject("validation")
            self.pause(self.plan.validation_pause_s)
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("right", right, sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.inject("commit")

    def on_fit_end(self) -> None:
        if self.plan.callbacks:
            sums = [float(parameter.double().sum()) for parameter in self.parameters()]
            state = {"lr": self.lr, "max_epochs": self.trainer.max_epochs, "step": self.trainer.global_step}
            self.write_line(final=sums, **state, accumulated=self.trainer.accumulate_grad_batches)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=self.lr)
        decays_after = max(1, 3 * self.trainer.max_epochs // 4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, decays_after, gamma=0.2)]


# --- faults ---

Fault = Callable[[Net, str], None]


def once(action: Callable[[Net], None], *, rank: int, step: int = 0, during: str = "train") -> Fault:
    """Returns a fault that calls the action once: on this rank, at this step or later."""
    return partial(_once, action, rank, step, during)


def _once(action: Callable[[Net], None], rank: int, step: int, during: str, net: Net, at: str) -> None:
    is_due = at == during and net.global_rank == rank and net.trainer.global_step >= step
    if is_due and net.trainer.state.fn == "fit" and net.first(f"{during} {step} of rank {rank}"):
        action(net)


def joins_later(net: Net, at: str) -> None:
    """Delays a replacement until the other ranks have continued without the lost rank."""
    if at == "setup" and net.is_replacement:
        net.wait_until(net.has_been_smaller)


def kill(net: Net) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(net: Net) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def terminate(net: Net) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def end_early(net: Net) -> None:
    net.trainer.should_stop = True


def sleep(net: Net) -> None:
    time.sleep(1000)


def fail(net: Net) -> None:
    raise ValueError("a bad sample")


# --- the script ---


def main() -> None:
    directory = Path(sys.argv[1])
    plan = pickle.loads((directory / "plan").read_bytes())
    pl.seed_everything(3)
    callbacks: list[pl.Callback] = [
        pl.callbacks.ModelCheckpoint(directory / "checkpoints", monitor="right", mode="max", save_last=True)
    ]
    callbacks += [getattr(ext, name)(**arguments) for name, arguments in plan.policy.items()]
    callbacks += [getattr(pl.callbacks, name)(**arguments) for name, arguments in plan.callbacks.items()]
    net = Net(directory, plan)
    if plan.unfreezes_at is not None:
        net.backbone = net.net[1:4]
        callbacks.append(pl.callbacks.BackboneFinetuning(plan.unfreezes_at, backbone_initial_lr=4e-3))
    kinds = {"horovodrun": ext.HorovodStrategy, "torchrun": ext.DDPElasticStrategy, "spawn": ext.DDPSpawnStrategy}
    own_arguments = {} if plan.started_by == "torchrun" else {"elastic": True}
    if plan.started_by == "ray":
        own_arguments["num_workers"] = plan.num_ranks
    strategy = kinds.get(plan.started_by, ext.DDPRayStrategy)(**own_arguments, **plan.strategy)
    devices = {"horovodrun": 1, "torchrun": int(os.environ.get("LOCAL_WORLD_SIZE", 0)), "ray": "auto"}
    arguments = {
        "max_epochs": NUM_EPOCHS,
        "accelerator": "cpu",
        "devices": devices.get(plan.started_by, plan.num_ranks),
        "logger": False,
        "callbacks": callbacks,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": directory,
        **plan.trainer,
    }
    if plan.is_on_one_gpu:
        pass_for_own_host()
        arguments["accelerator"] = "gpu"
        if plan.started_by == "spawn":
            arguments["devices"] = "auto"
            strategy.parallel_devices = [
                torch.device("cuda", 0)
            ] * plan.num_ranks  # the strategy rejects it as an argument
    trainer = pl.Trainer(**arguments, strategy=strategy)
    training_set, held_out = digits()
    trained = DataLoader(training_set, batch_size=16, shuffle=True, num_workers=plan.num_workers)
    trainer.fit(net, trained, DataLoader(held_out, batch_size=32), ckpt_path=plan.ckpt_path)
    if plan.again:
        arguments |= {"max_epochs": 1, "callbacks": []}
        again = pl.Trainer(**arguments, strategy=trainer.strategy.strategy_name)
        net.write_line(validated=again.validate(net, DataLoader(held_out, batch_size=32), verbose=False)[0]["right"])
        again.fit(net, trained)
    net.cpu().eval()
    with torch.no_grad():
        images, labels, _ = held_out.tensors
        accuracy = (net.net(images).argmax(1) == labels).float().mean().item()
    weights = [parameter.flatten()[:3].tolist() for parameter in net.parameters()]
    net.trainer = trainer
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    net.write_line(accuracy=accuracy, steps=trainer.global_step, weights=weights, lr=lr)


if __name__ == "__main__":
    from tests.support import elastic_script  # so that functions of the plan find the classes of this module

    elastic_script.main()

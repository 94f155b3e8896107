"""Trains a model and injects the selected failure, to show the resulting error message or failure report.

    python docs/failure_demo.py raise                              # strategy="ddp_ext", two CPU ranks
    python docs/failure_demo.py kill --strategy ddp_spawn_ext
    horovodrun --gloo -np 2 python docs/failure_demo.py raise --strategy horovod_ext

docs/failures.md quotes the output. Each case is a function of this module with the name of the command-line argument.
"""

import argparse
import logging
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lightning_strategies_ext as ext

#: Function that injects the failure; called before each training step.
STEP, FAILING_RANK = 10, 1


class Net(pl.LightningModule):
    """A linear layer that injects a failure before a training step.

    Args:
        fault: Function that injects the failure.
    """

    def __init__(self, fault: Callable[["Net"], None] | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
        self.fault = fault

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the mean of the output as a loss."""
        is_replica = self.trainer.num_devices > self.trainer.world_size
        if self.fault is not None and batch_idx == STEP and (self.global_rank == FAILING_RANK or is_replica):
            self.fault(self)
        return self.layer(batch[0]).square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns twenty batches for two ranks."""
        return DataLoader(self.data(), batch_size=8)

    def data(self) -> Dataset[Any]:
        """Returns random samples."""
        return TensorDataset(torch.randn(320, 8))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns an SGD optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Uneven(Net):
    """A model whose ranks have different numbers of batches."""

    def data(self) -> Dataset[Any]:
        """Returns twenty batches on rank 0 and fifteen on rank 1."""
        return TensorDataset(torch.randn(120 if self.global_rank == FAILING_RANK else 160, 8))


class LogsOnOneRank(Net):
    """A model of which only one rank calls a collective."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Calls a collective on one rank only."""
        if self.global_rank == FAILING_RANK:
            self.log("loss", 1.0, sync_dist=True)


def fit(strategy: Any, model: Net, **options: Any) -> None:
    """Trains for one epoch on two CPU ranks."""
    devices = 1 if strategy == "horovod_elastic_ext" else 2
    options = {"accelerator": "cpu", "devices": devices, "max_epochs": 1, **options}
    trainer = pl.Trainer(
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model)


def _raise(model: Net) -> None:
    raise ValueError("the labels of this batch are wrong")


def _kill(model: Net) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate(model: Net) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _sleep(model: Net) -> None:
    time.sleep(3600)


def _count_in_each_replica(model: Net) -> None:
    model.last_loss = torch.rand(()).item()


def raise_(strategy: str) -> None:
    """A rank raises."""
    fit(strategy, Net(_raise))


def kill(strategy: str) -> None:
    """A rank receives a SIGKILL, as on a host without free memory."""
    fit(strategy, Net(_kill))


def sigterm(strategy: str) -> None:
    """A rank receives a SIGTERM."""
    fit(strategy, Net(_terminate))


def stuck(strategy: str) -> None:
    """A rank sleeps; the hang timeout is ten seconds."""
    kinds = {"ddp_ext": ext.DDPStrategy, "ddp_spawn_ext": ext.DDPSpawnStrategy, "horovod_ext": ext.HorovodStrategy}
    fit(kinds[strategy](hang_timeout=10), Net(_sleep))


def uneven(strategy: str) -> None:
    """A rank has fewer batches than the other rank."""
    fit(strategy, Uneven(), use_distributed_sampler=False)


def mixed_up(strategy: str) -> None:
    """Ranks call different collectives."""
    fit(strategy, LogsOnOneRank())


def pickle(strategy: str) -> None:
    """The module has an attribute that cannot be pickled for a worker."""
    model = Net()
    model.log_file = open(os.devnull)  # noqa: SIM115
    fit(strategy, model)


def port(strategy: str) -> None:
    """The main port for the rendezvous of two hosts is in use."""
    if "LOCAL_RANK" not in os.environ:
        taken = socket.create_server(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
    fit(strategy, Net(), num_nodes=2)


def state_in_a_step(strategy: str) -> None:
    """A step sets an attribute to a different value on each replica of ``dp_ext``."""
    fit(strategy, Net(_count_in_each_replica))


def argument(strategy: str) -> None:
    """An argument has a name that no strategy accepts."""
    ext.DDPStrategy(find_unused_parameter=True)


def combination(strategy: str) -> None:
    """Two arguments exclude each other."""
    ext.HorovodStrategy(uneven_inputs="join", op="adasum")


def devices(strategy: str) -> None:
    """A device does not exist."""
    ext.DDPStrategy(parallel_devices=[torch.device("cuda", 0), torch.device("cuda", 7)])


def more_devices(strategy: str) -> None:
    """The Trainer has more devices than the launcher has started ranks."""
    fit(strategy, Net(), devices=3)


def shared_memory(strategy: str) -> None:
    """/dev/shm is too small: each rank requests more memory than any machine has."""
    fit(ext.DDPStrategy(process_group_options=ext.ShmOptions(segment_num_bytes=1 << 50)), Net())


def main() -> None:
    """Runs a case."""
    cases = {
        "raise": raise_,
        "kill": kill,
        "sigterm": sigterm,
        "stuck": stuck,
        "uneven": uneven,
        "mixed-up": mixed_up,
        "pickle": pickle,
        "port": port,
        "state-in-a-step": state_in_a_step,
        "argument": argument,
        "combination": combination,
        "devices": devices,
        "more-devices": more_devices,
        "shared-memory": shared_memory,
    }
    listed = "\n".join(f"  {name:<16} {case.__doc__}" for name, case in cases.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=cases)
    parser.add_argument("--strategy", default="ddp_ext")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", ".*(does not have many workers|sync_dist).*")
    if "elastic" not in arguments.strategy:  # the docstring of the case
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    cases[arguments.case](arguments.strategy)


if __name__ == "__main__":
    main()

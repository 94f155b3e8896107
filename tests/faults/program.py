"""A user's script with a fault on one rank: ``python program.py CASE-AS-JSON DIRECTORY``.

The script trains for two epochs with DataLoader workers, validation, and checkpoints; then it tests and predicts.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_strategies_ext import DDPSpawnStrategy, DDPStrategy, HorovodStrategy
from lightning_strategies_ext.fabric import DDPStrategy as FabricDDPStrategy
from tests.support.shared_gpu import pass_for_own_host

HANG_TIMEOUT_S = 5.0
NUM_BATCHES = 6


class OwnBaseException(BaseException):
    """An exception that no ``except Exception`` catches."""


class Fault:
    """A fault that is injected once, at a moment on a rank."""

    def __init__(self, kind: str, moment: str, rank: int, directory: str) -> None:
        self.kind = kind
        self.moment = moment
        self.rank = rank
        self.directory = Path(directory)

    def at(self, moment: str, rank: int) -> None:
        """Injects the fault if this is its moment and its rank; called at each moment."""
        happened = self.directory / "happened"
        if (moment, rank) != (self.moment, self.rank) or happened.exists():
            return
        happened.write_text(json.dumps([time.time(), os.getpid()]))
        getattr(self, self.kind)()

    def exception(self) -> None:
        raise ValueError("the first cause")

    def base_exception(self) -> None:
        raise OwnBaseException("the first cause")

    def sigterm(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def sigint(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def sigkill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def sigsegv(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def sigstop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def os_exit(self) -> None:
        os._exit(0)

    def sleep(self) -> None:
        time.sleep(3600)

    def hold_gil(self) -> None:
        ctypes.PyDLL(None).sleep(3600)

    def collective(self) -> None:
        import torch.distributed as dist

        dist.all_reduce(torch.ones(3, device="cuda" if dist.get_backend() == "nccl" else "cpu"))

    def cable(self) -> None:
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)  # the network of this rank's host


class Rows(Dataset):
    """Dataset of random numbers, which DataLoader workers fetch; fetching may fail."""

    def __init__(self, fault: Fault, rank: int = 0) -> None:
        self.fault = fault
        self.rank = rank
        self.rows = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        if torch.utils.data.get_worker_info() is not None:
            self.fault.at("data-loader worker", self.rank)
        return self.rows[index]


class Model(LightningModule):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.net = nn.Linear(8, 1)

    def at(self, moment: str) -> None:
        self.fault.at(moment, self.global_rank)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.at("setup")

    def loader(self, num_workers: int = 0) -> DataLoader[Tensor]:
        return DataLoader(Rows(self.fault, self.global_rank), batch_size=8, num_workers=num_workers)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self.loader(num_workers=1)

    val_dataloader = test_dataloader = predict_dataloader = loader

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            self.at("forward")
        output = self.net(batch)
        if batch_idx == 3:
            output.register_hook(lambda grad: self.at("backward"))
        return output.pow(2).mean()

    def optimizer_step(self, epoch: int, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(epoch, batch_idx, *args, **kwargs)
        if batch_idx == 3:
            self.at("optimizer step")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.at("sanity check" if self.trainer.sanity_checking else "validation")
        self.log("loss", self.net(batch).mean(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.at("end of epoch")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.current_epoch == 1:
            self.at("checkpoint")

    def teardown(self, stage: str) -> None:
        if stage == "fit":
            self.at("teardown")

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.at("predict")
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


STRATEGIES = {"ddp_ext": DDPStrategy, "ddp_spawn_ext": DDPSpawnStrategy, "horovod_ext": HorovodStrategy}


def rank_to_be(case: dict[str, Any]) -> int:
    """Returns the rank that this process will have."""
    local_rank, host = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "NODE_RANK"))
    return host * (case["world_size"] // case["hosts"]) + local_rank


def train(case: dict[str, Any], directory: str) -> None:
    """Runs the script with the Trainer."""
    fault = Fault(case["kind"], case["moment"], case["rank"], directory)
    fault.at("before the group", rank_to_be(case))
    kind = STRATEGIES.get(case["strategy"])
    trainer = Trainer(
        strategy=case["strategy"] if kind is None else kind(hang_timeout=HANG_TIMEOUT_S),
        accelerator=case["accelerator"],
        devices=case["world_size"] // case["hosts"],
        num_nodes=case["hosts"],
        max_epochs=2,
        limit_train_batches=NUM_BATCHES,
        limit_val_batches=2,
        limit_test_batches=2,
        limit_predict_batches=4,
        callbacks=[ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)],
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(fault)
    trainer.fit(model)
    fault.at("between two stages", trainer.global_rank)
    trainer.test(model, verbose=False)
    trainer.predict(model, return_predictions=False)


def loop(case: dict[str, Any], directory: str) -> None:
    """Runs the script with Fabric."""
    fault = Fault(case["kind"], case["moment"], case["rank"], directory)
    fault.at("before the group", rank_to_be(case))
    strategy = FabricDDPStrategy(hang_timeout=HANG_TIMEOUT_S)
    devices, num_nodes = case["world_size"] // case["hosts"], case["hosts"]
    fabric = Fabric(strategy=strategy, accelerator=case["accelerator"], devices=devices, num_nodes=num_nodes)
    fabric.launch()
    fault.at("setup", fabric.global_rank)
    net = nn.Linear(8, 1)
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(Rows(fault, fabric.global_rank), batch_size=8, num_workers=1))
    for epoch in range(2):
        for index, batch in zip(range(NUM_BATCHES), loader, strict=False):
            if index == 3:
                fault.at("forward", fabric.global_rank)
            output = net(batch)
            if index == 3:
                output.register_hook(lambda grad: fault.at("backward", fabric.global_rank))
            fabric.backward(output.pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            if index == 3:
                fault.at("optimizer step", fabric.global_rank)
        if epoch == 1:
            fault.at("checkpoint", fabric.global_rank)
        fabric.save(Path(directory, f"epoch={epoch}.ckpt"), {"model": net})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for background jobs
    case = json.loads(sys.argv[1])
    if case["accelerator"] != "cpu":
        pass_for_own_host()
    (loop if case["strategy"] == "fabric" else train)(case, sys.argv[2])

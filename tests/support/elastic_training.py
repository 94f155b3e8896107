"""A user's script, to be started by an elastic ``horovodrun``, by torchrun or by itself: digits, and what befalls its
ranks on the way.

    python -m tests.support.elastic_training DIRECTORY PLAN

PLAN is JSON: ``workers`` is how many ``fit`` starts, on Ray with ``is_on_ray``, ``local_ranks`` how many torchrun has
started, neither is there under ``horovodrun``; ``strategy`` are arguments of the strategy, ``trainer`` of the Trainer,
``events`` a list of ``{"do": "kill" | "forget" | "signal" | "raise" | "sleep" | "barrier" | "hosts" | "unplug" |
"await" | "hold", "at": "train" | "commit" | "validation" | "setup", "step": N, "rank": R | "any", "world": ranks that
there are, "batches": how many have counted since there are so many, "after": number of an event, "fn": stage}``, of
which each happens once; "await" is for a world of fewer ranks, "hold" for the event whose number is ``"until"``. With
``unfreezes_at`` the first layers are frozen before that epoch; with ``is_on_one_gpu`` all ranks share the first GPU.
DIRECTORY receives a file per process, of one line per batch that counts, and what the end was.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import psutil
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics import SumMetric

import lightning_strategies_ext as ext
from lightning_strategies_ext.elastic.keeper import RUN_ID
from tests.support.one_gpu import pass_for_own_host, put_all_on_one

NUM_TRAINED, NUM_HELD_OUT = 1437, 360
NUM_EPOCHS = 4


class Digits(Dataset):
    """Images, their labels and their numbers."""

    def __init__(self, is_held_out: bool) -> None:
        # scikit-learn's `load_digits` reads them so, and takes a second to be imported.
        scikit_learn = Path(importlib.util.find_spec("sklearn").origin).parent
        digits = torch.from_numpy(np.loadtxt(scikit_learn / "datasets/data/digits.csv.gz", delimiter=","))
        images, labels = digits[:, :-1], digits[:, -1].long()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.numbers = order[NUM_TRAINED:] if is_held_out else order[:NUM_TRAINED]
        self.images = images[self.numbers].float() / 16
        self.labels = labels[self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index], index


class Net(pl.LightningModule):
    def __init__(self, directory: Path, plan: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()),
            *(nn.Conv2d(12, 24, 3, stride=2), nn.BatchNorm2d(24), nn.ReLU()),
            *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(216, 10)),
        )
        self.counted = SumMetric()
        self.directory, self.events = directory, plan.get("events", [])
        self.pause_s, self.validation_pause_s = plan.get("pause_s", 0.0), plan.get("validation_pause_s", 0.0)
        self.num_ranks = plan["num_ranks"]
        self.num_batches = 0
        self.pauses_in = plan.get("pauses_in", [self.num_ranks])
        self.automatic_optimization = not plan.get("is_manual", False)
        self.is_on_one_gpu = plan.get("is_on_one_gpu", False)

    def configure_callbacks(self) -> list[pl.Callback]:
        if self.is_on_one_gpu:
            pass_for_own_host()
        return []

    def happen(self, at: str) -> None:
        for number, event in enumerate(self.events):
            mark = self.directory / f"event{number}"
            is_due = event.get("at", "train") == at and self.trainer.global_step >= event["step"] and not mark.exists()
            is_due = is_due and event.get("world", self.trainer.world_size) == self.trainer.world_size
            is_due = is_due and ("after" not in event or (self.directory / f"event{event['after']}").exists())
            is_due = is_due and self.num_batches >= event.get("batches", 0)
            is_due = is_due and event.get("fn", "fit") == self.trainer.state.fn.value
            if not is_due or event.get("rank", 0) not in (self.global_rank, "any"):
                continue
            mark.touch()
            self.write(event=event)
            if event["do"] == "hosts":
                (self.directory / "hosts").write_text("".join(f"{host}:1\n" for host in event["hosts"]))
            elif event["do"] == "forget":
                kept_by = {"lightning_strategies_ext.elastic.keeper", os.environ[RUN_ID]}
                for process in psutil.process_iter(["cmdline"]):
                    if kept_by <= {*(process.info["cmdline"] or ())}:
                        process.kill()
                os.kill(os.getpid(), signal.SIGKILL)
            elif event["do"] == "unplug":
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            elif event["do"] == "await":
                while not self.has_been_smaller():
                    time.sleep(0.01)
            elif event["do"] == "hold":
                while not (self.directory / f"event{event['until']}").exists():
                    time.sleep(0.01)
            elif event["do"] == "sleep":
                time.sleep(event.get("seconds", 1000))
            elif event["do"] == "barrier":
                self.trainer.strategy.barrier()
            elif event["do"] == "raise":
                raise ValueError("a bad sample")
            else:
                os.kill(os.getpid(), getattr(signal, event.get("signal", "SIGKILL")))

    def has_been_smaller(self) -> bool:
        written = "".join(path.read_text() for path in self.directory.glob("process*"))
        return any(f'"world": {size},' in written for size in range(1, self.num_ranks))

    def pause(self, seconds: float) -> None:
        time.sleep(seconds if self.trainer.world_size in self.pauses_in else 0.0)

    def write(self, **what: Any) -> None:
        with (self.directory / f"process{os.getpid()}").open("a") as file:
            print(json.dumps({"time": time.time(), "rank": self.global_rank, **what}), file=file)

    def setup(self, stage: str) -> None:
        self.happen("setup")

    def on_train_start(self) -> None:
        self.num_batches = 0
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        batch = 0 if progress.is_last_batch else progress.current.completed
        epoch = self.trainer.fit_loop.epoch_progress.current.processed
        place = {"world": self.trainer.world_size, "slot": self.trainer.local_rank}
        self.write(**place, epoch=epoch, batch=batch, step=self.trainer.global_step)
        if self.trainer.accumulate_grad_batches > 1:
            # Its first batch waits for no other rank, and could be said before rank 0 has said that the world begins.
            self.trainer.strategy.barrier()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.pause(self.pause_s)
        self.happen("train")
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
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
            self.write(epoch=self.current_epoch, batch=batch_idx, samples=batch[2].tolist())

    def on_train_epoch_end(self) -> None:
        if not self.automatic_optimization:
            self.lr_schedulers().step()
        logged = {name: float(self.trainer.callback_metrics[name]) for name in ("seen", "counted", "loss_epoch")}
        self.write(epoch=self.current_epoch, **logged)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.happen("validation") if batch_idx == 1 else None
            self.pause(self.validation_pause_s)
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("right", right, sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.happen("commit")

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=4e-3)
        decays_after = max(1, 3 * self.trainer.max_epochs // 4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, decays_after, gamma=0.2)]


def main() -> None:
    directory, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    pl.seed_everything(3)
    callbacks: list[pl.Callback] = [
        pl.callbacks.ModelCheckpoint(directory / "checkpoints", monitor="right", mode="max", save_last=True)
    ]
    for name, arguments in plan.get("policy", {}).items():
        callbacks.append(getattr(ext, name)(**arguments))
    net = Net(directory, plan)
    if "unfreezes_at" in plan:
        net.backbone = net.net[1:4]
        callbacks.append(pl.callbacks.BackboneFinetuning(plan["unfreezes_at"], backbone_initial_lr=4e-3))
    arguments = {
        "max_epochs": NUM_EPOCHS,
        "accelerator": "cpu",
        "devices": plan.get("workers") or plan.get("local_ranks", 1),
        "logger": False,
        "callbacks": callbacks,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": directory,
        **plan.get("trainer", {}),
    }
    if "local_ranks" in plan:
        strategy: Any = ext.DDPElasticStrategy(**plan.get("strategy", {}))
    elif plan.get("is_on_ray", False):
        strategy = ext.DDPRayStrategy(plan["workers"], elastic=True, **plan.get("strategy", {}))
    else:
        kind = ext.DDPSpawnStrategy if "workers" in plan else ext.HorovodStrategy
        strategy = kind(elastic=True, **plan.get("strategy", {}))
    if plan.get("is_on_one_gpu", False):
        pass_for_own_host()
        arguments["accelerator"] = "gpu"
        if "workers" in plan:
            del arguments["devices"]
            if not plan.get("is_on_ray", False):
                put_all_on_one(strategy, plan["workers"])
    trainer = pl.Trainer(**arguments, strategy=strategy)
    trained = DataLoader(Digits(False), batch_size=16, shuffle=True, num_workers=plan.get("num_workers", 0))
    held_out = Digits(True)
    trainer.fit(net, trained, DataLoader(held_out, batch_size=32), ckpt_path=plan.get("ckpt_path"))
    if plan.get("again", False):
        arguments |= {"max_epochs": 1, "callbacks": []}
        again = pl.Trainer(**arguments, strategy=trainer.strategy.strategy_name)
        net.write(validated=again.validate(net, DataLoader(held_out, batch_size=32), verbose=False)[0]["right"])
        again.fit(net, trained)
    net.cpu().eval()
    with torch.no_grad():
        accuracy = (net.net(held_out.images).argmax(1) == held_out.labels).float().mean().item()
    weights = [parameter.flatten()[:3].tolist() for parameter in net.parameters()]
    net.trainer = trainer
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    net.write(accuracy=accuracy, steps=trainer.global_step, weights=weights, lr=lr)


if __name__ == "__main__":
    main()

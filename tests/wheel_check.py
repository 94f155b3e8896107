"""Checks a wheel that is installed with one of its extras, outside of a checkout.

    python wheel_check.py lightning

``make matrix CORNERS=wheel`` runs this program in an environment for each extra.
"""

import importlib
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

SHM = """
import torch
import torch.distributed as dist
import torch.multiprocessing


def work(rank, address):
    dist.init_process_group("shm", init_method=address, rank=rank, world_size=2)
    total = torch.full((1000,), float(rank + 1))
    dist.all_reduce(total)
    assert total.eq(3).all()
    dist.destroy_process_group()


if __name__ == "__main__":
    import sys

    torch.multiprocessing.spawn(work, (sys.argv[1],), 2)
"""

NET = """
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""

TRAINING = """
import sys

import torch
import {trainer} as pl
from torch.utils.data import DataLoader, TensorDataset


{net}

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net()
    before = model.layer.weight.detach().clone()
    trainer = pl.Trainer(
        strategy=sys.argv[1], accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8))
    assert not torch.equal(model.layer.weight, before)
    print("trained", trainer.world_size, flush=True)
"""


def run(*command: str) -> str:
    """Runs the interpreter; the command must succeed."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lightning-strategies-ext:" not in done.stderr, done.stderr
    return done.stdout


def train(trainer: str, *strategies: str) -> None:
    """Trains with each of the strategies."""
    Path("train.py").write_text(TRAINING.format(trainer=trainer, net=NET))
    for strategy in strategies:
        assert "trained" in run("train.py", strategy), strategy


def main(extra: str) -> None:
    """Checks one extra."""
    package = importlib.import_module("lightning_strategies_ext")
    assert "site-packages" in str(package.__file__), package.__file__
    Path("shm.py").write_text(SHM)
    run("shm.py", f"file://{Path.cwd()}/rendezvous")
    if extra == "lightning":
        assert "ddp_ext" in run("-m", "lightning_strategies_ext")
        train("lightning.pytorch", "ddp_ext", "ddp_spawn_ext", "dp_ext")
    if extra == "pytorch-lightning":
        assert "ddp_ext" in run("-m", "lightning_strategies_ext")
        train("pytorch_lightning", "ddp_ext", "ddp_spawn_ext", "dp_ext")
    if extra == "horovod-build":
        run("-m", "lightning_strategies_ext", "install-horovod")
    requirements = requires("lightning-strategies-ext") or []
    named = [line for line in requirements if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    assert bool(named) == bool(extra), requirements
    run("-m", "pip", "check")
    print(f"the wheel works with {extra or 'no extra'}, which has {len(named)} requirements")


if __name__ == "__main__":
    main(sys.argv[1])

"""Trains with torch's DistributedDataParallel over the process group `shm`, without Lightning.

    torchrun --nproc-per-node 2 examples/shm_without_lightning.py
    torchrun --nproc-per-node 2 examples/shm_without_lightning.py --backend gloo    # torch's backend, for comparison

torch finds the backend `shm` through an entry point of this package; the script does not import it. With two ranks,
both backends give bitwise identical weights.
"""

import argparse
import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data() -> tuple[TensorDataset, TensorDataset]:
    """Returns handwritten digits for training, and held-out digits."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    train_x, held_out_x, train_y, held_out_y = (torch.as_tensor(array) for array in split)
    return TensorDataset(train_x.float() / 16, train_y), TensorDataset(held_out_x.float() / 16, held_out_y)


def train(epochs: int, width: int, lr: float) -> tuple[nn.Module, int, float]:
    """Trains on this rank's shard of the images.

    Args:
        epochs: Number of passes over the images.
        width: Units in each of the two hidden layers.
        lr: Learning rate of Adam.

    Returns:
        The network, the number of steps, and the duration of the steps in seconds.
    """
    torch.manual_seed(1)
    images, _ = make_data()
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(images)
    loader = DataLoader(images, batch_size=32, sampler=sampler)
    dist.barrier()
    started = time.perf_counter()
    for epoch in track(range(epochs), "Training", disable=dist.get_rank() != 0):
        sampler.set_epoch(epoch)
        for features, labels in loader:
            loss = functional.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net, epochs * len(loader), time.perf_counter() - started


def accuracy_of(net: nn.Module) -> float:
    """Returns the accuracy on held-out images; each rank classifies its shard of them."""
    _, held_out = make_data()
    share = held_out[dist.get_rank() :: dist.get_world_size()]
    with torch.inference_mode():
        hits = (net(share[0]).argmax(dim=1) == share[1]).sum()
    dist.all_reduce(hits)
    return hits.item() / len(held_out)


def main() -> None:
    """Trains, measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="shm", help="shm or gloo")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--width", type=int, default=256, help="units in each hidden layer")
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/shm_without_lightning.py")

    dist.init_process_group(arguments.backend)
    net, num_steps, seconds = train(arguments.epochs, arguments.width, arguments.lr)
    accuracy = accuracy_of(net)
    if dist.get_rank() == 0:
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
        table = Table("what", title="Handwritten digits, without Lightning")
        table.add_column("value", justify="right")
        table.add_row("process group", dist.get_backend())
        table.add_row("ranks", str(dist.get_world_size()))
        table.add_row(
            "Lightning was imported", "yes" if {"lightning", "pytorch_lightning"} & sys.modules.keys() else "no"
        )
        table.add_row("training steps", str(num_steps))
        table.add_row("milliseconds per step", f"{1000 * seconds / num_steps:.2f}")
        table.add_row("accuracy on held-out images", f"{accuracy:.4f}")
        table.add_row("fingerprint of the weights", hashlib.sha256(weights).hexdigest()[:12])
        Console().print(table)
    dist.barrier()  # gloo's thread frees the last all-reduce's tensor; in an exiting process, that is a crash
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Trains on the handwritten digits of ``examples/digits.py`` with Fabric, any strategy, and a custom training loop.

    python examples/fabric_digits.py                             # strategy="ddp_ext", two CPU processes
    python examples/fabric_digits.py --strategy ddp_spawn_ext    # worker processes; the function's value is returned
    python examples/fabric_digits.py --strategy dp_ext           # one process, two replicas

The loop is the same for all strategies.
"""

import argparse
from pathlib import Path

import torch
from digits import NUM_HELD_OUT, DigitsData, DigitsNet
from lightning.fabric import Fabric
from rich.console import Console
from torch.nn import functional


def train(fabric: Fabric, epochs: int, batch_size: int, checkpoint: Path) -> float:
    """Trains, saves a checkpoint, and returns the accuracy on held-out images. Runs in each process of the strategy.

    Args:
        fabric: The Fabric object, which sets up the model and runs backward passes and collectives.
        epochs: Number of passes over the training images.
        batch_size: Images per process and step.
        checkpoint: Path of the checkpoint.
    """
    fabric.seed_everything(1, verbose=False)
    data, net = DigitsData(batch_size), DigitsNet().net
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=3e-3))
    train_loader, held_out_loader = fabric.setup_dataloaders(data.train_dataloader(), data.val_dataloader())
    for _ in range(epochs):
        model.train()
        for images, labels in train_loader:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
    fabric.save(checkpoint, {"model": model})
    model.eval()
    with torch.inference_mode():
        hits = sum((model(images).argmax(dim=1) == labels).sum() for images, labels in held_out_loader)
    hits = fabric.all_reduce(torch.as_tensor(hits, dtype=torch.float32), reduce_op="sum")
    return hits.item() / NUM_HELD_OUT


def main() -> None:
    """Trains, and prints the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ddp_ext", help="any name that Fabric(strategy=...) accepts")
    parser.add_argument("--devices", type=int, default=2, help="processes per host; replicas with dp_ext")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints", "fabric_digits.ckpt"))
    arguments = parser.parse_args()
    fabric = Fabric(strategy=arguments.strategy, devices=arguments.devices, accelerator=arguments.accelerator)
    accuracy = fabric.launch(train, arguments.epochs, arguments.batch_size, arguments.checkpoint)
    if fabric.is_global_zero:
        Console().print(f"{arguments.strategy}: accuracy on {NUM_HELD_OUT} held-out images {accuracy:.4f}")


if __name__ == "__main__":
    main()

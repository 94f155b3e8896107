"""Trains on the handwritten digits of ``examples/digits.py`` in a loop of one's own, with Fabric and any strategy.

    python examples/fabric_digits.py                             # strategy="ddp_ext", two CPU processes
    python examples/fabric_digits.py --strategy ddp_spawn_ext    # worker processes; the function's value is returned
    python examples/fabric_digits.py --strategy dp_ext           # one process, two replicas

The loop is the same for all of them.
"""

import argparse
from pathlib import Path

import torch
from digits import NUM_HELD_OUT, DigitsData, DigitsNet
from lightning.fabric import Fabric
from rich.console import Console
from torch.nn import functional


def train(fabric: Fabric, epochs: int, batch_size: int, checkpoint: Path) -> float:
    """Trains, saves, and returns the accuracy on held-out images. Runs in each process that the strategy has.

    Args:
        fabric: What setup, gradients and collectives go through.
        epochs: How often each image is seen.
        batch_size: Images per process and step.
        checkpoint: Where the weights go.
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
    """Trains and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ddp_ext", help="any name that Fabric(strategy=...) accepts")
    parser.add_argument("--devices", type=int, default=2, help="per host")
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

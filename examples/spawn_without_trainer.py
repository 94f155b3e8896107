"""Runs a function in worker processes that form a process group, without a Trainer, and gets back what it returns.

    python examples/spawn_without_trainer.py                       # two workers
    python examples/spawn_without_trainer.py --plot centers.png    # and a picture of what they have found

The function is k-means: each worker assigns its share of the images to the nearest centers, and an all-reduce gives all
workers the means of the whole. It is called once for each of several random beginnings, of which the best one counts.
The first call starts the workers and they stay for the others. The function does not see the labels; they are used to
say how pure the clusters are.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor

from lightning_strategies_ext import DDPSpawnStrategy


def k_means(images: Tensor, num_clusters: int, seed: int) -> tuple[Tensor, float, int]:
    """Finds centers such that images are near to one of them. Runs in each worker.

    Args:
        images: All of them, one per row; workers share the memory that they are in.
        num_clusters: How many centers.
        seed: Seed of the choice of the images that are the first centers, the same in all workers.

    Returns:
        The centers, the mean squared distance of an image to the nearest one, and the number of rounds that it fell.
    """
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:num_clusters]
    centers, before, num_rounds = images[chosen], float("inf"), 0
    share = images[dist.get_rank() :: dist.get_world_size()]
    while True:
        distances, nearest = torch.cdist(share, centers).square().min(dim=1)
        sums = torch.zeros_like(centers).index_add_(0, nearest, share)
        counts, total = torch.bincount(nearest, minlength=num_clusters).to(sums), distances.sum()
        for tensor in (sums, counts, total):
            dist.all_reduce(tensor)
        mean = total.item() / len(images)
        if mean >= before:
            return centers, mean, num_rounds
        centers = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), centers)
        before, num_rounds = mean, num_rounds + 1


def purity(images: Tensor, labels: Tensor, centers: Tensor) -> float:
    """The share of images that are what most images of their cluster are."""
    nearest = torch.cdist(images, centers).argmin(dim=1)
    counts = torch.bincount(nearest * 10 + labels, minlength=10 * len(centers)).view(-1, 10)
    return counts.max(dim=1).values.sum().item() / len(images)


def plot(centers: Tensor, path: Path) -> None:
    """Draws the centers as images."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, (len(centers) + 1) // 2, figsize=(8, 4), squeeze=False)
    for panel in panels.flat:
        panel.axis("off")
    for panel, center in zip(panels.flat, centers, strict=False):
        panel.imshow(center.view(8, 8), cmap="gray_r")
    figure.savefig(path, dpi=100, bbox_inches="tight")


def main() -> None:
    """Clusters and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--clusters", type=int, default=10)
    parser.add_argument("--beginnings", type=int, default=20, help="how often to start at random")
    parser.add_argument("--plot", type=Path, help="where a picture of the best centers goes")
    arguments = parser.parse_args()

    pixels, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = pixels / 16
    found, seconds = [], []
    with DDPSpawnStrategy(parallel_devices=[torch.device("cpu")] * arguments.workers) as strategy:
        for seed in track(range(arguments.beginnings), "Clustering"):
            started = time.perf_counter()
            found.append(strategy.spawn(k_means, images, arguments.clusters, seed=seed))
            seconds.append(time.perf_counter() - started)

    centers, distance, num_rounds = min(found, key=lambda result: result[1])
    table = Table("what", title=f"{arguments.clusters} clusters of {len(images)} handwritten digits")
    table.add_column("value", justify="right")
    table.add_row("workers", str(arguments.workers))
    table.add_row("mean squared distance, best of all", f"{distance:.6f}")
    table.add_row("mean squared distance, worst of all", f"{max(result[1] for result in found):.6f}")
    table.add_row("rounds of the best", str(num_rounds))
    table.add_row("purity of the best", f"{purity(images, labels, centers):.4f}")
    table.add_row("seconds of the first call, with the start of workers", f"{seconds[0]:.3f}")
    if len(seconds) > 1:
        table.add_row("seconds of a later call, the median", f"{sorted(seconds[1:])[len(seconds[1:]) // 2]:.3f}")
    Console().print(table)
    if arguments.plot is not None:
        plot(centers, arguments.plot)
        Console().print(f"Picture: {arguments.plot}")


if __name__ == "__main__":
    main()

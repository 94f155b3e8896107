"""Runs a function in worker processes that form a process group, and receives its return value, without a Trainer.

    python examples/spawn_without_trainer.py                       # two workers
    python examples/spawn_without_trainer.py --plot centers.png    # also saves a picture of the clusters

The function is k-means. Each worker assigns its shard of the images to the nearest centers, and an all-reduce computes
the new centers from all images. The script calls the function with several random initial centers, and uses the result
with the smallest distance. The first call starts the workers, and the later calls reuse them. The function does not use
the labels: the script uses them to measure the purity of the clusters.
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
    """Finds cluster centers that are close to the images. Runs in each worker.

    Args:
        images: All images, one per row, in memory that the workers share.
        num_clusters: Number of centers.
        seed: Seed that selects the images that are the initial centers, equal in all workers.

    Returns:
        The centers, the mean squared distance from an image to its nearest center, and the number of iterations that
        reduced this distance.
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
    """Returns the fraction of images whose label is the most frequent label of their cluster."""
    nearest = torch.cdist(images, centers).argmin(dim=1)
    counts = torch.bincount(nearest * 10 + labels, minlength=10 * len(centers)).view(-1, 10)
    return counts.max(dim=1).values.sum().item() / len(images)


def plot(centers: Tensor, path: Path) -> None:
    """Saves a picture of the centers."""
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
    """Clusters the images, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--clusters", type=int, default=10)
    parser.add_argument("--beginnings", type=int, default=20, help="number of random initial centers to try")
    parser.add_argument("--plot", type=Path, help="path of a picture of the best centers")
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
    table.add_row("mean squared distance, best run", f"{distance:.6f}")
    table.add_row("mean squared distance, worst run", f"{max(result[1] for result in found):.6f}")
    table.add_row("iterations of the best run", str(num_rounds))
    table.add_row("purity of the best run", f"{purity(images, labels, centers):.4f}")
    table.add_row("seconds of the first call, including the start of workers", f"{seconds[0]:.3f}")
    if len(seconds) > 1:
        table.add_row("median seconds of a later call", f"{sorted(seconds[1:])[len(seconds[1:]) // 2]:.3f}")
    Console().print(table)
    if arguments.plot is not None:
        plot(centers, arguments.plot)
        Console().print(f"Picture: {arguments.plot}")


if __name__ == "__main__":
    main()

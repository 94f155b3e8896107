"""What ``trainer.predict`` returned in one worker, on its way to the main process: sample by sample accounted for."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DistributedSampler

from lightning_strategies_ext.launch.tasks.dataset_order import KeyedOutputs, in_dataset_order
from lightning_strategies_ext.launch.transport.pickling import Pickled, dump

#: How much of the predictions travels in one piece, in bytes.
CHUNK_NUM_BYTES = 8 << 20


@dataclass
class RankPredictions:
    """A rank's predictions, per dataloader: the keys of each batch's samples, the size of a full batch, the outputs."""

    keys: list[list[list[int]]]
    batch_sizes: list[int]
    outputs: list[list[Any]]

    @classmethod
    def from_trainer(cls, trainer: Any, value: Any) -> "RankPredictions":
        """Those that a Trainer has just made.

        Args:
            trainer: The Trainer, after ``predict``.
            value: What ``predict`` returned in this process.
        """
        loaders = CombinedLoader(trainer.predict_dataloaders, "sequential").flattened
        outputs = [value] if len(loaders) == 1 else value
        keys, batch_sizes = [], []
        for loader, of_loader in zip(loaders, outputs, strict=True):
            keys_of_loader, batch_size = _keys(loader, len(of_loader), trainer.global_rank, trainer.world_size)
            keys.append(keys_of_loader)
            batch_sizes.append(batch_size)
        return cls(keys, batch_sizes, outputs)

    def chunks(self) -> Iterator[Any]:
        """What to send: the plan, then the outputs in pieces."""
        yield RankPredictions(self.keys, self.batch_sizes, [])
        chunk: list[Pickled] = []
        size = 0
        for of_loader in self.outputs:
            while of_loader:
                chunk.append(dump(of_loader.pop(0), is_return=True))
                size += sum(memoryview(buffer).nbytes for buffer in chunk[-1].buffers)
                if size > CHUNK_NUM_BYTES:
                    yield chunk
                    chunk, size = [], 0
        yield chunk

    def gathered(self, world_size: int) -> Any:
        """The predictions of all ranks on all hosts, in order; called by all ranks together."""
        plans: list[Any] = [None] * world_size
        dist.all_gather_object(plans, self)
        return merge_predictions(
            plans, [iter([[dump(output) for of_loader in plan.outputs for output in of_loader]]) for plan in plans]
        )


def _keys(loader: Any, num_batches: int, rank: int, world_size: int) -> tuple[list[list[int]], int]:
    """For each batch of a loader the positions of its samples in the order of a single process; the full batch size."""
    batch_sampler = loader.batch_sampler if hasattr(loader, "batch_sampler") else None
    batches = getattr(batch_sampler, "seen_batch_indices", [])[:num_batches]  # Lightning's wrapper has noted them
    if len(batches) < num_batches:
        return [[number * world_size + rank] for number in range(num_batches)], 1
    batch_size = getattr(batch_sampler, "batch_size", None) or max(map(len, batches), default=1)
    sampler = getattr(batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler) and not sampler.shuffle:
        # The sampler deals the samples out in turn. It may have added some at the end, to be fair to all.
        num_samples = len(sampler.dataset)  # type: ignore[arg-type]
        position = sampler.rank
        keys = []
        for batch in batches:
            positions = range(position, position + len(batch) * sampler.num_replicas, sampler.num_replicas)
            keys.append([key % num_samples for key in positions])
            position = positions.stop
        return keys, batch_size
    return [list(batch) for batch in batches], batch_size


def merge_predictions(plans: list[RankPredictions], sources: list[Iterator[Any]]) -> Any:
    """What ``predict`` returns: batches in the order of the dataset; a list of those if there are several dataloaders.

    Args:
        plans: The first item of each rank's :meth:`RankPredictions.chunks`.
        sources: The other items.
    """
    outputs = [_flattened(source) for source in sources]
    merged = []
    for loader, batch_size in enumerate(plans[0].batch_sizes):
        ranks = [
            KeyedOutputs(plan.keys[loader], _first(of_rank, len(plan.keys[loader])))
            for plan, of_rank in zip(plans, outputs, strict=True)
        ]
        merged.append(in_dataset_order(ranks, batch_size))
    for of_rank in outputs:
        next(of_rank, None)
    return merged[0] if len(merged) == 1 else merged


def _flattened(chunks: Iterator[list[Pickled]]) -> Iterator[Any]:
    for chunk in chunks:
        while chunk:
            yield chunk.pop(0).load()


def _first(outputs: Iterator[Any], number: int) -> Iterator[Any]:
    for _ in range(number):
        yield next(outputs)

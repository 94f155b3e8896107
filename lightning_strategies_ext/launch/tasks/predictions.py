"""Predictions of each worker, sent to the main process with the position of each sample, and merged there."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DistributedSampler

from lightning_strategies_ext.launch.protocol import PredictionChunk, PredictionPlan
from lightning_strategies_ext.launch.tasks.dataset_order import KeyedOutputs, in_dataset_order
from lightning_strategies_ext.launch.transport.pickling import Pickled, dump

#: Size of a chunk of predictions in bytes.
CHUNK_NUM_BYTES = 8 << 20


@dataclass
class RankPredictions:
    """Predictions of one rank: their plan, and the outputs of each dataloader."""

    plan: PredictionPlan
    outputs: list[list[Any]]

    @classmethod
    def from_trainer(cls, trainer: Any, value: Any) -> "RankPredictions":
        """Returns the predictions of a Trainer whose ``predict`` has returned ``value`` in this process."""
        loaders = CombinedLoader(trainer.predict_dataloaders, "sequential").flattened
        outputs = [value] if len(loaders) == 1 else value
        keys, batch_sizes = [], []
        for loader, loader_outputs in zip(loaders, outputs, strict=True):
            keys_of_loader, batch_size = _keys(loader, len(loader_outputs), trainer.global_rank, trainer.world_size)
            keys.append(keys_of_loader)
            batch_sizes.append(batch_size)
        return cls(PredictionPlan(keys, batch_sizes), outputs)

    def results(self) -> Iterator[PredictionPlan | PredictionChunk]:
        """Yields what the worker sends: the plan, then the outputs in chunks."""
        yield self.plan
        chunk: list[Pickled] = []
        size = 0
        for loader_outputs in self.outputs:
            while loader_outputs:
                chunk.append(dump(loader_outputs.pop(0), is_return=True))
                size += sum(memoryview(buffer).nbytes for buffer in chunk[-1].buffers)
                if size > CHUNK_NUM_BYTES:
                    yield PredictionChunk(chunk)
                    chunk, size = [], 0
        yield PredictionChunk(chunk)

    def gathered(self, world_size: int) -> Any:
        """Returns the predictions of all ranks on all hosts, in dataset order. Collective: all ranks call it."""
        ranks: list[Any] = [None] * world_size
        dist.all_gather_object(ranks, self)
        return merge_predictions([rank.plan for rank in ranks], [chain.from_iterable(rank.outputs) for rank in ranks])


def _keys(loader: Any, num_batches: int, rank: int, world_size: int) -> tuple[list[list[int]], int]:
    """Returns each batch's sample positions in the order of a single process, and the full batch size."""
    batch_sampler = loader.batch_sampler if hasattr(loader, "batch_sampler") else None
    batches = getattr(batch_sampler, "seen_batch_indices", [])[:num_batches]  # of Lightning's wrapper
    if len(batches) < num_batches:
        return [[number * world_size + rank] for number in range(num_batches)], 1
    batch_size = getattr(batch_sampler, "batch_size", None) or max(map(len, batches), default=1)
    sampler = getattr(batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler) and not sampler.shuffle:
        # The sampler assigns samples round-robin, and may repeat some at the end, so that all ranks have equally many.
        num_samples = len(sampler.dataset)  # type: ignore[arg-type]
        position = sampler.rank
        keys = []
        for batch in batches:
            positions = range(position, position + len(batch) * sampler.num_replicas, sampler.num_replicas)
            keys.append([key % num_samples for key in positions])
            position = positions.stop
        return keys, batch_size
    return [list(batch) for batch in batches], batch_size


def merge_predictions(plans: list[PredictionPlan], outputs: list[Iterator[Any]]) -> Any:
    """Returns the batches of all ranks in the order of the dataset; a list per dataloader if there are several.

    Args:
        plans: First item of each rank's :meth:`RankPredictions.results`.
        outputs: Outputs of each rank, see :func:`outputs_in`.
    """
    merged = []
    for loader, batch_size in enumerate(plans[0].batch_sizes):
        keys = [plan.keys[loader] for plan in plans]
        ranks = [KeyedOutputs(own, islice(of_rank, len(own))) for own, of_rank in zip(keys, outputs, strict=True)]
        merged.append(in_dataset_order(ranks, batch_size))
    for of_rank in outputs:
        next(of_rank, None)  # reads the reply that ends the results
    return merged[0] if len(merged) == 1 else merged


def outputs_in(chunks: Iterator[PredictionChunk]) -> Iterator[Any]:
    """Yields the outputs in the remaining items of a rank's :meth:`RankPredictions.results`."""
    for chunk in chunks:
        while chunk.outputs:
            yield chunk.outputs.pop(0).load()

"""Predictions in dataset order while batches arrive: what a reader returns before the end."""

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_strategies_ext.launch.tasks.dataset_order import KeyedOutputs, in_dataset_order
from tests.launch.test_dataset_order import assert_same, boxes, chunks, logits, one_process, whole


class TestStreaming:
    """Outputs are read late and released early."""

    @pytest.mark.parametrize("make", [logits, whole], ids=["split", "whole"])
    @pytest.mark.parametrize("copies", [1, 3], ids=["distributed", "all samples on all ranks"])
    def test_ranks_are_read_in_lockstep(self, make, copies):
        world_size, batch_size, num_samples = 3, 4, 96
        alive: dict[int, set[int]] = {rank: set() for rank in range(world_size)}
        most_alive, pulled = [], [0] * world_size

        def recorded(rank: int, batches: list[list[int]]) -> Iterator[Any]:
            for number, keys in enumerate(batches):
                pulled[rank] += 1
                if copies == 1:
                    assert max(pulled) - min(pulled) <= 1, "a rank is read ahead of the other ranks"
                output = make(keys)
                tensor = output if isinstance(output, torch.Tensor) else output["mean"]
                alive[rank].add(number)
                weakref.finalize(tensor, alive[rank].discard, number)
                most_alive.append(max(map(len, alive.values())))
                holder = [output]
                del output, tensor
                yield holder.pop()

        stride = world_size if copies == 1 else 1
        shards = [list(range(rank if copies == 1 else 0, num_samples, stride)) for rank in range(world_size)]
        ranks = [
            KeyedOutputs(chunks(shard, batch_size), recorded(rank, chunks(shard, batch_size)))
            for rank, shard in enumerate(shards)
        ]
        result = in_dataset_order(ranks, batch_size)
        assert len(result) == num_samples // batch_size
        assert pulled == [len(rank.keys) for rank in ranks]
        assert max(most_alive) <= 2
        assert not any(alive.values())

    def test_no_output_is_read_before_it_is_needed(self):
        """All samples of the second rank follow the samples of the first rank, so the second rank is read last."""
        read = []

        def recorded(rank: int, batches: list[list[int]]) -> Iterator[Any]:
            for keys in batches:
                read.append(rank)
                yield logits(keys)

        shards = [chunks(list(range(8)), 2), chunks(list(range(8, 16)), 2)]
        in_dataset_order([KeyedOutputs(shard, recorded(rank, shard)) for rank, shard in enumerate(shards)], 2)
        assert read == [0, 0, 0, 0, 1, 1, 1, 1]

    @pytest.mark.parametrize(
        "make",
        [
            logits,
            lambda keys: {"a": [logits(keys).numpy()]},
            lambda keys: [{"box": box} for box in boxes(keys)],
            lambda keys: (torch.zeros(9), np.zeros(9)),
        ],
        ids=["tensor", "ndarray", "entries", "whole"],
    )
    @pytest.mark.parametrize("batch_size", [2, 4])
    def test_results_share_no_memory_with_the_outputs(self, make, batch_size):
        def overwrite(value: Any) -> Any:
            if isinstance(value, torch.Tensor | np.ndarray):
                value[...] = -1
            elif isinstance(value, dict | list | tuple):
                for part in value.values() if isinstance(value, dict) else value:
                    overwrite(part)
            return value

        outputs = one_process(make, [0, 1, 2, 3], 2)
        result = in_dataset_order([KeyedOutputs([[0, 1], [2, 3]], iter(outputs))], batch_size)
        overwrite(outputs)
        can_be_split = not isinstance(outputs[0], tuple)
        assert_same(result, one_process(make, [0, 1, 2, 3], batch_size if can_be_split else 2))

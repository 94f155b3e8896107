"""Algorithms: collectives as sequences of rounds. Their results are those of torch.distributed.

All algorithms work on flat, contiguous tensors of one dtype. Large tensors are split into pieces of a slot's size; two
pieces are published while a third is read. An empty tensor is one empty piece, so every collective has a round.

=================  =====================================================================================
all-reduce         2 ranks, or a small tensor: each rank publishes its tensor and reduces all tensors, in
                   one round per piece. Otherwise each rank reduces its shard of a piece and publishes the
                   result, in two rounds per piece.
reduce-scatter     Each rank publishes its tensor and reduces its shard of all tensors.
broadcast          The root publishes its tensor.
all-gather         Each rank publishes its tensor and copies all tensors.
gather, scatter    As all-gather, but only the root reads, or only the root publishes.
barrier            One round without data.
=================  =====================================================================================
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from lightning_strategies_ext.shm.reduction import Reduction
from lightning_strategies_ext.shm.rounds import LOOKAHEAD, Round, Rounds

#: Minimum size of a shard in bytes; smaller shards are not worth a second round.
_MIN_SHARD_NUM_BYTES: Final = 16 * 1024

Plan = tuple[Sequence[Round], int]


def concatenate_plans(plans: Sequence[Plan]) -> Plan:
    """Returns one plan that executes several plans one after the other."""
    if len(plans) == 1:
        return plans[0]
    return [step for steps, _ in plans for step in steps], min(lookahead for _, lookahead in plans)


def all_reduce(rounds: Rounds, tensor: Tensor, reduction: Reduction) -> Plan:
    """Plans the reduction of ``tensor`` over all ranks, in place on every rank."""
    if rounds.size > 2 and tensor.nbytes >= rounds.size * _MIN_SHARD_NUM_BYTES:
        return _all_reduce_by_shards(rounds, tensor, reduction)
    return _reduce_whole(rounds, tensor, reduction, is_reader=True)


def reduce(rounds: Rounds, tensor: Tensor, root: int, reduction: Reduction) -> Plan:
    """Plans the reduction of ``tensor`` over all ranks, in place on the root."""
    return _reduce_whole(rounds, tensor, reduction, is_reader=rounds.local_rank == root)


def broadcast(rounds: Rounds, tensor: Tensor, root: int) -> Plan:
    """Plans the copy of the root's ``tensor`` to all ranks."""
    steps = []
    for piece in _bytes_of(tensor).split(rounds.slot_num_bytes):

        def read(views: list[Tensor], piece: Tensor = piece) -> None:
            if rounds.local_rank != root:
                piece.copy_(views[root])

        num_bytes = [piece.numel() if rank == root else 0 for rank in range(rounds.size)]
        steps.append(Round(num_bytes, _copying(piece), read))
    return steps, LOOKAHEAD


def all_gather(rounds: Rounds, outputs: Sequence[Tensor], tensor: Tensor, readers: Sequence[int] | None = None) -> Plan:
    """Plans the copy of each rank's ``tensor`` to all ranks, or to some ranks.

    Args:
        rounds: Rounds of the ranks.
        outputs: One tensor per rank, of the size of ``tensor``; ignored on ranks that do not read.
        tensor: Tensor of this rank.
        readers: Ranks that receive the tensors; all ranks if None.
    """
    is_reader = readers is None or rounds.local_rank in readers
    pieces = [_bytes_of(output).split(rounds.slot_num_bytes) for output in outputs] if is_reader else []
    steps = []
    for index, piece in enumerate(_bytes_of(tensor).split(rounds.slot_num_bytes)):

        def read(views: list[Tensor], index: int = index, piece: Tensor = piece) -> None:
            for rank, into in enumerate(pieces):
                into[index].copy_(piece if rank == rounds.local_rank else views[rank])

        steps.append(Round([piece.numel()] * rounds.size, _copying(piece), read))
    return steps, LOOKAHEAD


def scatter(rounds: Rounds, output: Tensor, inputs: Sequence[Tensor], root: int) -> Plan:
    """Plans the copy of the root's ``inputs[i]`` to ``output`` of rank i."""
    shard_size = max(1, rounds.slot_num_bytes // rounds.size)
    into = _bytes_of(output).split(shard_size)
    parts = [_bytes_of(tensor).split(shard_size) for tensor in inputs] if rounds.local_rank == root else []
    steps = []
    for index, piece in enumerate(into):
        length = piece.numel()

        def read(views: list[Tensor], index: int = index, piece: Tensor = piece) -> None:
            if rounds.local_rank == root:
                piece.copy_(parts[root][index])
            else:
                piece.copy_(views[root].narrow(0, rounds.local_rank * piece.numel(), piece.numel()))

        num_bytes = [length * rounds.size if rank == root else 0 for rank in range(rounds.size)]
        steps.append(Round(num_bytes, _concatenating([part[index] for part in parts]), read))
    return steps, LOOKAHEAD


def reduce_scatter(rounds: Rounds, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Plan:
    """Plans the reduction of ``inputs[i]`` over all ranks to ``output`` of rank i."""
    shard_size = max(1, rounds.slot_num_bytes // rounds.size // output.element_size())
    parts = [tensor.split(shard_size) for tensor in inputs]
    steps = []
    for index, into in enumerate(output.split(shard_size)):

        def read(views: list[Tensor], index: int = index, into: Tensor = into) -> None:
            start = rounds.local_rank * into.numel()
            operands = [
                view.view(into.dtype).narrow(0, start, into.numel()) if view.numel() else into for view in views
            ]
            operands[rounds.local_rank] = parts[rounds.local_rank][index]
            reduction(operands, into)

        publish = _concatenating([_bytes_of(part[index]) for part in parts])
        steps.append(Round([into.nbytes * rounds.size] * rounds.size, publish, read))
    return steps, LOOKAHEAD


def barrier(rounds: Rounds) -> Plan:
    """Plans a round without data, which no rank finishes before all ranks have started it."""
    return [Round([0] * rounds.size, _copying(torch.empty(0)), lambda views: None)], LOOKAHEAD


def _reduce_whole(rounds: Rounds, tensor: Tensor, reduction: Reduction, is_reader: bool) -> Plan:
    steps = []
    for piece in tensor.split(rounds.slot_num_bytes // tensor.element_size()):

        def read(views: list[Tensor], piece: Tensor = piece) -> None:
            if is_reader:
                parts = [view.view(piece.dtype) for view in views]
                parts[rounds.local_rank] = piece
                reduction(parts, piece)

        steps.append(Round([piece.nbytes] * rounds.size, _copying(_bytes_of(piece)), read))
    return steps, LOOKAHEAD


def _all_reduce_by_shards(rounds: Rounds, tensor: Tensor, reduction: Reduction) -> Plan:
    scatters, gathers = [], []
    for piece in tensor.split(rounds.slot_num_bytes // tensor.element_size()):
        shards = list(piece.tensor_split(rounds.size))
        starts = [shard.storage_offset() - piece.storage_offset() for shard in shards]
        own = shards[rounds.local_rank]

        def reduce_own(views: list[Tensor], own: Tensor = own, start: int = starts[rounds.local_rank]) -> None:
            parts = [view.view(own.dtype).narrow(0, start, own.numel()) if view.numel() else own for view in views]
            reduction(parts, own)

        def copy_others(views: list[Tensor], shards: list[Tensor] = shards) -> None:
            for rank, shard in enumerate(shards):
                if rank != rounds.local_rank:
                    shard.copy_(views[rank].view(shard.dtype))

        scatters.append(Round([piece.nbytes] * rounds.size, _copying(_bytes_of(piece)), reduce_own))
        gathers.append(Round([shard.nbytes for shard in shards], _copying(_bytes_of(own)), copy_others))
    if len(scatters) == 1:
        return [scatters[0], gathers[0]], 1
    # With a lookahead of two rounds, a shard is published at least two rounds after the round that reads its piece.
    steps = [scatters[0]]
    for scatter_step, gather_step in zip(scatters[1:], gathers, strict=False):
        steps += [scatter_step, gather_step]
    return [*steps, gathers[-1]], LOOKAHEAD


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _copying(piece: Tensor) -> Callable[[Tensor], None]:
    def publish(into: Tensor) -> None:
        into.copy_(piece)

    return publish


def _concatenating(pieces: list[Tensor]) -> Callable[[Tensor], None]:
    def publish(into: Tensor) -> None:
        torch.cat(pieces, out=into)

    return publish

"""Collectives as sequences of rounds. What each does on all ranks is torch.distributed's; here is how it travels.

All work on flat, contiguous tensors of one dtype. Large tensors go in pieces of a slot's size, of which two are under
way while a third is read.

=================  =====================================================================================
all-reduce         2 ranks, or small: each publishes all it has, each reduces all, in one round a piece.
                   Otherwise each reduces its share of a piece and publishes that, in two rounds a piece.
reduce-scatter     each publishes all it has, each reduces its share
broadcast          the source publishes
all-gather         each publishes all it has, each copies all
gather, scatter    the same, and only the root reads, or only the root publishes
barrier            a round of nothing
=================  =====================================================================================
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from lightning_strategies_ext.shm.reduction import Reduction
from lightning_strategies_ext.shm.rounds import LOOKAHEAD, Rounds, Step

#: Shares smaller than this are not worth a second round, in bytes.
_MIN_SHARE_NUM_BYTES: Final = 16 * 1024

Plan = tuple[Sequence[Step], int]


def joined(plans: Sequence[Plan]) -> Plan:
    """Several plans as one, carried out one after the other."""
    if len(plans) == 1:
        return plans[0]
    return [step for steps, _ in plans for step in steps], min(lookahead for _, lookahead in plans)


def all_reduce(rounds: Rounds, tensor: Tensor, reduction: Reduction) -> Plan:
    """Reduces ``tensor`` of all ranks into that of each."""
    if rounds.size > 2 and tensor.nbytes >= rounds.size * _MIN_SHARE_NUM_BYTES:
        return _all_reduce_by_shares(rounds, tensor, reduction)
    return _reduce_whole(rounds, tensor, reduction, is_reader=True)


def reduce(rounds: Rounds, tensor: Tensor, root: int, reduction: Reduction) -> Plan:
    """Reduces ``tensor`` of all ranks into that of the root."""
    return _reduce_whole(rounds, tensor, reduction, is_reader=rounds.rank == root)


def broadcast(rounds: Rounds, tensor: Tensor, root: int) -> Plan:
    """Copies the root's ``tensor`` to all ranks."""
    steps = []
    for piece in _bytes_of(tensor).split(rounds.slot_num_bytes):

        def read(views: list[Tensor], piece: Tensor = piece) -> None:
            if rounds.rank != root:
                piece.copy_(views[root])

        num_bytes = [piece.numel() if rank == root else 0 for rank in range(rounds.size)]
        steps.append(Step(num_bytes, _copying(piece), read))
    return steps or barrier(rounds)[0], LOOKAHEAD


def all_gather(rounds: Rounds, outputs: Sequence[Tensor], tensor: Tensor, readers: Sequence[int] | None = None) -> Plan:
    """Copies ``tensor`` of each rank into ``outputs`` of all, which have its size.

    Args:
        rounds: The ranks.
        outputs: One per rank; not looked at by ranks that do not read.
        tensor: This rank's.
        readers: The ranks that get it; all if None.
    """
    is_reader = readers is None or rounds.rank in readers
    pieces = [_bytes_of(output).split(rounds.slot_num_bytes) for output in outputs] if is_reader else []
    steps = []
    for index, piece in enumerate(_bytes_of(tensor).split(rounds.slot_num_bytes)):

        def read(views: list[Tensor], index: int = index, piece: Tensor = piece) -> None:
            for rank, into in enumerate(pieces):
                into[index].copy_(piece if rank == rounds.rank else views[rank])

        steps.append(Step([piece.numel()] * rounds.size, _copying(piece), read))
    return steps or barrier(rounds)[0], LOOKAHEAD


def scatter(rounds: Rounds, output: Tensor, inputs: Sequence[Tensor], root: int) -> Plan:
    """Copies each of the root's ``inputs`` into ``output`` of the rank that has its number."""
    share = max(1, rounds.slot_num_bytes // rounds.size)
    into = _bytes_of(output).split(share)
    parts = [_bytes_of(tensor).split(share) for tensor in inputs] if rounds.rank == root else []
    steps = []
    for index, piece in enumerate(into):
        length = piece.numel()

        def read(views: list[Tensor], index: int = index, piece: Tensor = piece) -> None:
            if rounds.rank == root:
                piece.copy_(parts[root][index])
            else:
                piece.copy_(views[root].narrow(0, rounds.rank * piece.numel(), piece.numel()))

        num_bytes = [length * rounds.size if rank == root else 0 for rank in range(rounds.size)]
        steps.append(Step(num_bytes, _laying_out([part[index] for part in parts]), read))
    return steps or barrier(rounds)[0], LOOKAHEAD


def reduce_scatter(rounds: Rounds, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction) -> Plan:
    """Reduces ``inputs`` of all ranks, each into ``output`` of the rank that has its number."""
    share = max(1, rounds.slot_num_bytes // rounds.size // output.element_size())
    parts = [tensor.split(share) for tensor in inputs]
    steps = []
    for index, into in enumerate(output.split(share)):

        def read(views: list[Tensor], index: int = index, into: Tensor = into) -> None:
            start = rounds.rank * into.numel()
            theirs = [view.view(into.dtype).narrow(0, start, into.numel()) if view.numel() else into for view in views]
            theirs[rounds.rank] = parts[rounds.rank][index]
            reduction(theirs, into)

        publish = _laying_out([_bytes_of(part[index]) for part in parts])
        steps.append(Step([into.nbytes * rounds.size] * rounds.size, publish, read))
    return steps or barrier(rounds)[0], LOOKAHEAD


def barrier(rounds: Rounds) -> Plan:
    """Ends on no rank before it has begun on all."""
    return [Step([0] * rounds.size, _copying(torch.empty(0)), lambda views: None)], LOOKAHEAD


def _reduce_whole(rounds: Rounds, tensor: Tensor, reduction: Reduction, is_reader: bool) -> Plan:
    steps = []
    for piece in tensor.split(rounds.slot_num_bytes // tensor.element_size()):

        def read(views: list[Tensor], piece: Tensor = piece) -> None:
            if is_reader:
                parts = [view.view(piece.dtype) for view in views]
                parts[rounds.rank] = piece
                reduction(parts, piece)

        steps.append(Step([piece.nbytes] * rounds.size, _copying(_bytes_of(piece)), read))
    return steps or barrier(rounds)[0], LOOKAHEAD


def _all_reduce_by_shares(rounds: Rounds, tensor: Tensor, reduction: Reduction) -> Plan:
    scatters, gathers = [], []
    for piece in tensor.split(rounds.slot_num_bytes // tensor.element_size()):
        shares = list(piece.tensor_split(rounds.size))
        starts = [share.storage_offset() - piece.storage_offset() for share in shares]
        own = shares[rounds.rank]

        def reduce_own(views: list[Tensor], own: Tensor = own, start: int = starts[rounds.rank]) -> None:
            parts = [view.view(own.dtype).narrow(0, start, own.numel()) if view.numel() else own for view in views]
            reduction(parts, own)

        def copy_others(views: list[Tensor], shares: list[Tensor] = shares) -> None:
            for rank, share in enumerate(shares):
                if rank != rounds.rank:
                    share.copy_(views[rank].view(share.dtype))

        scatters.append(Step([piece.nbytes] * rounds.size, _copying(_bytes_of(piece)), reduce_own))
        gathers.append(Step([share.nbytes for share in shares], _copying(_bytes_of(own)), copy_others))
    if len(scatters) == 1:
        return [scatters[0], gathers[0]], 1
    # A share is published once its piece has been read, which must be two rounds before: see `Rounds`.
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


def _laying_out(pieces: list[Tensor]) -> Callable[[Tensor], None]:
    def publish(into: Tensor) -> None:
        torch.cat(pieces, out=into)

    return publish

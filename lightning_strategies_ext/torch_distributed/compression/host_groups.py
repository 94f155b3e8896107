"""Process groups of an exchange on two levels: first inside each host, then between hosts.

Each rank of a host exchanges one shard of a tensor between the hosts, so that each shard crosses between hosts once.
Only the exchange between hosts is worth compressing.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext import shm
from lightning_strategies_ext._system.connections import record_connections
from lightning_strategies_ext._system.gloo_connections import restrict_gloo
from lightning_strategies_ext._system.peers import host_identity
from lightning_strategies_ext.torch_distributed import process_group


class HostGroups(NamedTuple):
    """Process groups of one rank.

    The groups are separate from other groups, so that no other collectives come between the collectives of an exchange.
    A single level on GPUs uses the default group: one thread starts all collectives of a backward pass there, and NCCL
    may deadlock when collectives of two groups overlap, such as collectives of the exchange and of
    SyncBatchNorm (``torch.distributed.new_group``, "Safe concurrent usage").

    Attributes:
        intra_host: Group of the ranks of this host; None with a single level.
        inter_host: Group of the ranks with which this rank exchanges its shard, one per host; all ranks with a single
            level.
        ranks_per_host: Number of ranks per host; 1 with a single level.
        local_index: Index of this rank among the ranks of its host.
        device: Device of the exchanged tensors.
    """

    intra_host: Any
    inter_host: Any
    ranks_per_host: int
    local_index: int
    device: torch.device

    @classmethod
    @record_connections(process_group.group_connections)
    def create(cls, device: torch.device, timeout: timedelta | None) -> "HostGroups":
        """Creates the groups. Collective: all ranks of the default group call it.

        There are two levels if there are several hosts, with the same number of ranks each and more than one.

        Args:
            device: Device of the exchanged tensors.
            timeout: Timeout of the collectives; torch's default if None.
        """
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, host_identity())
        counts = Counter(hosts)
        ranks_per_host = next(iter(counts.values()))
        if len(counts) == 1 or ranks_per_host == 1 or len(set(counts.values())) > 1:
            has_own = device.type == "cpu" or f"{device.type}:gloo" in dist.get_backend_config()
            with restrict_gloo(is_one_host=len(counts) == 1):
                group = dist.new_group(timeout=timeout) if has_own else dist.group.WORLD
            return cls(None, group, 1, 0, device)
        ranks_of = [[rank for rank, host in enumerate(hosts) if host == each] for each in counts]
        is_cpu = device.type == "cpu"
        backend = shm.NAME if is_cpu and shm.is_available() else None
        own_rank, intra_groups, inter_groups = dist.get_rank(), [], []
        for ranks in ranks_of:  # all ranks create all groups, in the same order
            intra_groups.append(dist.new_group(ranks, timeout, backend))
        with restrict_gloo(is_one_host=False):
            for column in zip(*ranks_of, strict=True):
                inter_groups.append(dist.new_group(list(column), timeout, "gloo" if is_cpu else None))
        own = next(index for index, ranks in enumerate(ranks_of) if own_rank in ranks)
        index = ranks_of[own].index(own_rank)
        return cls(intra_groups[own], inter_groups[index], ranks_per_host, index, device)

    def shards(self, sizes: Sequence[int]) -> list[range]:
        """Divides tensors into contiguous shards of about the same size, one for each rank of a host.

        Args:
            sizes: Sizes of the tensors, in elements.

        Returns:
            Indices of the tensors in each shard, in the order of the ranks.
        """
        shards, end, total, begun = [], 0, sum(sizes), 0
        for index in range(self.ranks_per_host):
            begin, limit = end, total * (index + 1) / self.ranks_per_host
            while end < len(sizes) and (begun + sizes[end] / 2 <= limit or index == self.ranks_per_host - 1):
                begun += sizes[end]
                end += 1
            shards.append(range(begin, end))
        return shards

    def exchange(self, pieces: Sequence[Tensor], exchange_inter_host: Callable[[], None]) -> None:
        """Sums pieces in place over all ranks.

        Args:
            pieces: Pieces of the ranks of a host, in the order of the ranks; one piece with a single level.
            exchange_inter_host: Callable that sums this rank's piece over :attr:`inter_host`.
        """
        if self.intra_host is None:
            exchange_inter_host()
            return
        ranks = dist.get_process_group_ranks(self.intra_host)
        for rank, piece in zip(ranks, pieces, strict=True):
            if piece.numel():
                dist.reduce(piece, rank, group=self.intra_host)
        if pieces[self.local_index].numel():
            exchange_inter_host()
        for rank, piece in zip(ranks, pieces, strict=True):
            if piece.numel():
                dist.broadcast(piece, rank, group=self.intra_host)

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """Sums tensors in place over all ranks, without compression; tensors of one dtype in one exchange."""
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            same_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1).to(self.device) for tensor in same_dtype])
            self._sum(flat)
            for tensor, summed in zip(same_dtype, flat.split([tensor.numel() for tensor in same_dtype]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def must_serialize(self, model: DistributedDataParallel) -> bool:
        """Returns whether each exchange must complete on the GPU before the backward pass starts other collectives.

        These are the collectives of the default group: of SyncBatchNorm, of DDP for unused parameters, and of sparse
        gradients.

        Args:
            model: Model in DDP.
        """
        if self.device.type == "cpu" or self.intra_host is None:
            return False
        return model.find_unused_parameters or any(
            isinstance(module, SyncBatchNorm) or getattr(module, "sparse", False) for module in model.modules()
        )

    def close(self) -> None:
        """Leaves the groups."""
        for group in (self.intra_host, self.inter_host):
            if group is not None and group is not dist.group.WORLD:
                process_group.leave_subgroup(group)

    def _sum(self, flat: Tensor) -> None:
        pieces = list(flat.tensor_split(self.ranks_per_host))
        own = pieces[self.local_index]

        def exchange_inter_host() -> None:
            dist.all_reduce(own, group=self.inter_host)

        self.exchange(pieces, exchange_inter_host)

"""Cost of each exchange of ``ddp_ext`` on a cluster, by the formulae of :mod:`benchmarks.scaling_model`.

Plain gradients are exchanged in one ring over all ranks over gloo. Other libraries use trees and hierarchical
exchanges, as ``process_group_backend="shm"`` does in its own way. Compressed exchanges are hierarchical, see
``docs/compression.md``: gradients are summed inside a host without compression, and each rank of the host exchanges a
share with other hosts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.scaling_model import (
    Cluster,
    Computation,
    Cost,
    Link,
    all_gather,
    efficiency,
    halving_doubling,
    ring,
    step,
    two_levels,
)
from lightning_strategies_ext.shm.one_shot import is_short

RING, TREE, TWO_LEVELS = "plain, ring", "plain, tree", "plain, two levels"
BF16, POWERSGD, TOPK, LOCALSGD = "bf16", "powersgd", "topk", "localsgd"
#: All predicted exchanges. DiLoCo exchanges the same as local SGD.
EXCHANGES = (RING, TREE, TWO_LEVELS, BF16, POWERSGD, TOPK, LOCALSGD)
#: Recommended exchanges, ordered by their effect on the training, smallest first.
BY_LOSS = (("plain", (RING, TWO_LEVELS)), (BF16, (BF16,)), (POWERSGD, (POWERSGD,)), (LOCALSGD, (LOCALSGD,)))

_FLOAT_NUM_BYTES = 4

#: Function that returns the seconds of an all-reduce: number of ranks, bytes, link.
AllReduce = Callable[[int, float, Link], float]


@dataclass(frozen=True)
class Compressions:
    """Parameters and costs of compressed exchanges.

    Attributes:
        thin_share: Elements of PowerSGD's messages over elements of the gradients, see :func:`thin_share`.
        topk_fraction: Fraction of the gradients that is sent; each with its index, which doubles the bytes.
        period: Number of steps between two exchanges of models.
        seconds: Exchange → seconds of compressing and restoring the gradients of one step, on the cores that compute; 0
            for exchanges without an entry.
    """

    thin_share: float
    topk_fraction: float = 0.01
    period: int = 32
    seconds: Mapping[str, float] = field(default_factory=dict)


def thin_share(shapes: Iterable[Sequence[int]], rank: int) -> float:
    """Returns the ratio of the elements that PowerSGD sends to the elements of the gradients.

    Args:
        shapes: Shapes of the parameters; dimensions after the first are merged.
        rank: Number of columns of the thin matrices.
    """
    sent = whole = 0
    for rows, *others in shapes:
        columns = 1
        for other in others:
            columns *= other
        whole += rows * columns
        sent += min(rows * columns, rank * (rows + columns))
    return sent / whole


def costs_of(
    name: str, cluster: Cluster, num_bytes: float, given: Compressions, all_reduce: AllReduce = ring
) -> tuple[Cost, float]:
    """Returns the cost of an exchange.

    Args:
        name: One of :data:`EXCHANGES`.
        cluster: The ranks.
        num_bytes: Number of bytes of all gradients, and of the model.
        given: Parameters of compressed exchanges.
        all_reduce: All-reduce between hosts, for hierarchical exchanges.

    Returns:
        The cost of a bucket, and additional seconds per step.
    """
    rare_s = given.seconds.get(name, 0.0)
    if name == RING:
        return (lambda size: ring(cluster.num_ranks, size, cluster.slowest)), rare_s
    if name == TREE:
        return partial(_tree, cluster), rare_s
    if name == LOCALSGD:
        return _local(cluster, num_bytes, given, all_reduce)

    def thin(num_ranks: int, size: float, link: Link) -> float:
        # Over gloo, each rank sends short messages to all other ranks, which sum them.
        num_sharing = cluster.ranks_per_host if cluster.num_hosts > 1 else 1
        is_one_shot = all_reduce is ring and is_short(size, num_ranks, num_sharing)
        return (all_gather if is_one_shot else all_reduce)(num_ranks, size, link)

    between: dict[str, AllReduce] = {
        TWO_LEVELS: all_reduce,
        BF16: lambda p, size, link: all_reduce(p, size / 2, link),
        POWERSGD: lambda p, size, link: 2 * thin(p, size * given.thin_share / 2, link),
        TOPK: lambda p, size, link: all_gather(p, 2 * given.topk_fraction * size, link),
    }
    exchange = between[name]
    if cluster.num_hosts == 1:  # with one rank per host, all ranks take part in the compressed exchange
        return (lambda size: exchange(cluster.num_ranks, size, cluster.inside)), rare_s
    return (lambda size: two_levels(cluster, size, exchange)), rare_s


def _tree(cluster: Cluster, num_bytes: float) -> float:
    """Returns the seconds of halving and doubling, nearest peers first, so that hosts exchange only shares."""
    inside_s = halving_doubling(cluster.ranks_per_host, num_bytes, cluster.inside)
    link = cluster.between.shared_by(cluster.ranks_per_host)
    return inside_s + halving_doubling(cluster.num_hosts, num_bytes / cluster.ranks_per_host, link)


def _local(cluster: Cluster, num_bytes: float, given: Compressions, all_reduce: AllReduce) -> tuple[Cost, float]:
    """Returns the cost of an exchange of gradients inside each host in each step, and of models once per period."""
    models, _ = costs_of(TWO_LEVELS, cluster, num_bytes, given, all_reduce)
    rare_s = models(num_bytes) / given.period + given.seconds.get(LOCALSGD, 0.0)
    if cluster.num_hosts == 1:
        return (lambda size: 0.0), rare_s
    return (lambda size: ring(cluster.ranks_per_host, size, cluster.inside)), rare_s


@dataclass(frozen=True)
class Training:
    """A training on a cluster.

    Attributes:
        alone_s: Seconds of a step of one rank alone.
        computation: Computation while all ranks of a host compute, and synchronize in each step.
        num_bytes: Number of bytes of the gradients.
        ranks_per_host: Number of ranks per host.
        inside: Link between ranks of a host.
        between: Link of a host to the network.
        compressions: Parameters of compressed exchanges.
        all_reduce: All-reduce between hosts, for hierarchical exchanges.
        apart: Computation of ranks that do not synchronize in each step, such as ranks of local SGD; the same if None.
    """

    alone_s: float
    computation: Computation
    num_bytes: float
    ranks_per_host: int
    inside: Link
    between: Link
    compressions: Compressions
    all_reduce: AllReduce = ring
    apart: Computation | None = None

    def step_s(self, name: str, num_ranks: int, *, overlaps: bool) -> float:
        """Returns the seconds of a step.

        Args:
            name: One of :data:`EXCHANGES`.
            num_ranks: Number of ranks on all hosts.
            overlaps: Whether exchanges overlap with the backward pass.
        """
        cluster = Cluster.of_ranks(num_ranks, self.ranks_per_host, self.inside, self.between)
        cost, rare_s = costs_of(name, cluster, self.num_bytes, self.compressions, self.all_reduce)
        computation = self.apart if name == LOCALSGD and self.apart is not None else self.computation
        return step(computation, cost, rare_s, overlaps=overlaps)

    def efficiency(self, name: str, num_ranks: int, *, overlaps: bool = True) -> float:
        """Returns the efficiency of weak scaling."""
        return efficiency(self.alone_s, self.step_s(name, num_ranks, overlaps=overlaps))

    def choice(self, num_ranks: int, enough: float) -> tuple[str, float]:
        """Returns the efficient exchange with the smallest effect on the training, or the fastest if none is efficient.

        Args:
            num_ranks: Number of ranks on all hosts.
            enough: Smallest accepted efficiency.

        Returns:
            Name and efficiency of the exchange.
        """
        reached = {label: max(self.efficiency(name, num_ranks) for name in names) for label, names in BY_LOSS}
        efficient = [label for label in reached if reached[label] >= enough]
        label = efficient[0] if efficient else max(reached, key=lambda each: reached[each])
        return label, reached[label]

"""What each exchange of ``ddp_ext`` costs on a cluster, by the formulae of :mod:`benchmarks.scaling_model`.

Plain gradients go around one ring over all ranks over gloo; a tree and two levels are what other libraries do, and
``process_group_backend="shm"`` in its own way. Whatever compresses works at two levels, see ``docs/compression.md``:
gradients are added up inside a host as they are, and each of its ranks carries a share between the hosts.
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
#: All that is predicted. DiLoCo exchanges what local SGD does.
EXCHANGES = (RING, TREE, TWO_LEVELS, BF16, POWERSGD, TOPK, LOCALSGD)
#: Of those, from what changes the training least to what changes it most.
BY_LOSS = (("plain", (RING, TWO_LEVELS)), (BF16, (BF16,)), (POWERSGD, (POWERSGD,)), (LOCALSGD, (LOCALSGD,)))

_FLOAT_NUM_BYTES = 4

#: Seconds of an all-reduce: ranks, bytes, link.
AllReduce = Callable[[int, float, Link], float]


@dataclass(frozen=True)
class Compressions:
    """What is exchanged in place of gradients, and what making it costs.

    Attributes:
        thin_share: Elements of PowerSGD's messages over elements of the gradients, see :func:`thin_share`.
        topk_fraction: Of the gradients, that are sent; each with its place, so that it costs twice the bytes.
        period: Steps from one exchange of models to the next.
        seconds: Exchange → what compressing and restoring the gradients of one step takes, on the cores that compute; 0
            where it is not named.
    """

    thin_share: float
    topk_fraction: float = 0.01
    period: int = 32
    seconds: Mapping[str, float] = field(default_factory=dict)


def thin_share(shapes: Iterable[Sequence[int]], rank: int) -> float:
    """Elements that PowerSGD sends over elements of the gradients: matrices as two thin ones, others as they are.

    Args:
        shapes: Of the parameters; what comes after the first number is multiplied.
        rank: Columns of the thin matrices.
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
    """What an exchange costs.

    Args:
        name: One of :data:`EXCHANGES`.
        cluster: The ranks.
        num_bytes: Of all gradients, which is that of the model too.
        given: For those that compress.
        all_reduce: What those that have two levels do between hosts.

    Returns:
        The cost of a bucket, and seconds per step that come on top.
    """
    rare_s = given.seconds.get(name, 0.0)
    if name == RING:
        return (lambda size: ring(cluster.num_ranks, size, cluster.slowest)), rare_s
    if name == TREE:
        return partial(_tree, cluster), rare_s
    if name == LOCALSGD:
        return _local(cluster, num_bytes, given, all_reduce)

    def thin(num_ranks: int, size: float, link: Link) -> float:
        # Over gloo, each rank sends what is short to all others, and adds up for itself.
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
    if cluster.num_hosts == 1:  # all ranks are at one level, which is the one that compresses
        return (lambda size: exchange(cluster.num_ranks, size, cluster.inside)), rare_s
    return (lambda size: two_levels(cluster, size, exchange)), rare_s


def _tree(cluster: Cluster, num_bytes: float) -> float:
    """Halving and doubling over all ranks, the nearest partners first: by then only a share has to leave the host."""
    inside_s = halving_doubling(cluster.ranks_per_host, num_bytes, cluster.inside)
    cable = cluster.between.shared_by(cluster.ranks_per_host)
    return inside_s + halving_doubling(cluster.num_hosts, num_bytes / cluster.ranks_per_host, cable)


def _local(cluster: Cluster, num_bytes: float, given: Compressions, all_reduce: AllReduce) -> tuple[Cost, float]:
    """Gradients inside each host if there are several, in each step; models between all, once in a period."""
    models, _ = costs_of(TWO_LEVELS, cluster, num_bytes, given, all_reduce)
    rare_s = models(num_bytes) / given.period + given.seconds.get(LOCALSGD, 0.0)
    if cluster.num_hosts == 1:
        return (lambda size: 0.0), rare_s
    return (lambda size: ring(cluster.ranks_per_host, size, cluster.inside)), rare_s


@dataclass(frozen=True)
class Training:
    """What is trained, and on what.

    Attributes:
        alone_s: Seconds of a step of one rank alone.
        computation: While as many compute as there are on a host, and meet in each step.
        num_bytes: Of the gradients.
        ranks_per_host: If there are as many.
        inside: Link between ranks of a host.
        between: Cable of a host.
        compressions: What is exchanged by those that compress.
        all_reduce: Between hosts, of those that have two levels.
        apart: The computation of ranks that do not meet in each step, as those of local SGD; the same if None.
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
        """Seconds of a step.

        Args:
            name: One of :data:`EXCHANGES`.
            num_ranks: Of all hosts.
            overlaps: Whether exchanges go on beside the backward pass.
        """
        cluster = Cluster.of_ranks(num_ranks, self.ranks_per_host, self.inside, self.between)
        cost, rare_s = costs_of(name, cluster, self.num_bytes, self.compressions, self.all_reduce)
        computation = self.apart if name == LOCALSGD and self.apart is not None else self.computation
        return step(computation, cost, rare_s, overlaps=overlaps)

    def efficiency(self, name: str, num_ranks: int, *, overlaps: bool = True) -> float:
        """Of weak scaling."""
        return efficiency(self.alone_s, self.step_s(name, num_ranks, overlaps=overlaps))

    def choice(self, num_ranks: int, enough: float) -> tuple[str, float]:
        """The exchange that changes the training least, of those that are efficient enough; else the fastest.

        Args:
            num_ranks: Of all hosts.
            enough: The efficiency that is.

        Returns:
            Its name, and its efficiency.
        """
        reached = {label: max(self.efficiency(name, num_ranks) for name in names) for label, names in BY_LOSS}
        good = [label for label in reached if reached[label] >= enough]
        label = good[0] if good else max(reached, key=lambda each: reached[each])
        return label, reached[label]

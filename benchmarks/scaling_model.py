"""Costs of exchanges and training steps by the alpha-beta model: pure functions without measurements.

A message of n bytes takes alpha + n * beta seconds: a latency, and a time per byte (Hockney 1994, "The communication
challenge for MPP: Intel Paragon and Meiko CS-2"). An algorithm takes the sum over the messages that one rank sends
consecutively. The cost of additions is not separate from the cost of sending: if links are measured by all-reduces,
beta contains it.

Limitations: the model contains no switches with other traffic, no random delays of ranks, and no messages that are too
short for a link to reach its rate.

Sources:
    Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
    Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

#: Bucket sizes of DDP: a first bucket of 1 MiB, then buckets of 25 MiB.
FIRST_BUCKET_NUM_BYTES, BUCKET_NUM_BYTES = 2**20, 25 * 2**20

#: Function that returns the seconds of an exchange of a number of bytes of gradients.
Cost = Callable[[float], float]


@dataclass(frozen=True)
class Link:
    """Link between two ranks.

    Attributes:
        latency_s: alpha, seconds per message of any length.
        s_per_byte: beta, seconds per byte.
    """

    latency_s: float
    s_per_byte: float

    @classmethod
    def of(cls, latency_us: float, bandwidth_gbit: float) -> "Link":
        """Creates a link from microseconds and gigabits (10^9) per second."""
        return cls(latency_us * 1e-6, 8e-9 / bandwidth_gbit)

    @property
    def latency_us(self) -> float:
        """Number of microseconds per message."""
        return self.latency_s * 1e6

    @property
    def bandwidth_gbit(self) -> float:
        """Number of gigabits (10^9) per second."""
        return 8e-9 / self.s_per_byte

    def shared_by(self, num_ranks: int) -> "Link":
        """Returns the link of each rank if several send at the same time: the latency, and a share of the bandwidth."""
        return replace(self, s_per_byte=self.s_per_byte * num_ranks)

    def messages_s(self, num_messages: float, num_bytes: float) -> float:
        """Returns the seconds of consecutive messages with a total number of bytes."""
        return num_messages * self.latency_s + num_bytes * self.s_per_byte


class Sample(NamedTuple):
    """Measurement of an exchange: messages and bytes that a rank sends consecutively, and seconds."""

    num_messages: float
    num_bytes: float
    seconds: float


def fit(samples: Sequence[Sample]) -> Link:
    """Fits a link to samples: least squares of the relative errors of the model.

    With absolute errors, the longest messages would determine the result, and alpha would be their residual.

    Raises:
        ValueError: If the samples do not have two different sizes.
    """
    rows = [(one.num_messages / one.seconds, one.num_bytes / one.seconds) for one in samples]
    mm, mb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    m, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = mm * bb - mb * mb
    if determinant <= 1e-12 * mm * bb:
        raise ValueError("the fit of a link requires messages of at least two different sizes")
    latency_s, s_per_byte = (bb * m - mb * b) / determinant, (mm * b - mb * m) / determinant
    if latency_s < 0:
        return Link(0.0, b / bb)
    return Link(latency_s, s_per_byte) if s_per_byte > 0 else Link(m / mm, 0.0)


def ring(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Returns the seconds of an all-reduce in a ring.

    Each rank sends 1/p of the bytes p - 1 times to sum them, and p - 1 times to distribute the sums: the smallest
    number of bytes that a rank can send, and the largest number of messages (Patarasuk and Yuan 2009).

    Args:
        num_ranks: p.
        num_bytes: Number of bytes of each rank.
        link: Link between neighbors. For hosts with several ranks each, it is the network link, if neighbors in the
            ring are on the same host: one rank of a host sends over this link, and all ranks wait for it.
    """
    return 2 * all_gather(num_ranks, num_bytes / num_ranks, link)


def all_gather(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Returns the seconds of an all-gather in a ring.

    A reduce-scatter of ``num_ranks * num_bytes`` takes the same time (Thakur et al. 2005).

    Args:
        num_ranks: p.
        num_bytes: Number of bytes that each rank sends to all others.
        link: Link between neighbors.
    """
    return link.messages_s(num_ranks - 1, (num_ranks - 1) * num_bytes)


def halving_doubling(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Returns the seconds of an all-reduce in a tree: recursive halving, then recursive doubling (Thakur et al. 2005).

    Peers at distance 1, 2, 4, ... exchange a half, a quarter, an eighth of the bytes, and gather the sums in the
    opposite order: the bytes of a ring in 2·log2(p) messages. Ranks beyond the largest power of two first send their
    bytes to a peer, and receive the sums at the end.

    Args:
        num_ranks: p.
        num_bytes: Number of bytes of each rank.
        link: Link between any two ranks while all ranks send.
    """
    num_doublings = num_ranks.bit_length() - 1
    power = 2**num_doublings
    within = link.messages_s(2 * num_doublings, 2 * (power - 1) / power * num_bytes)
    return within + (link.messages_s(2, 2 * num_bytes) if power < num_ranks else 0.0)


@dataclass(frozen=True)
class Cluster:
    """Hosts with the same number of ranks each.

    Attributes:
        num_hosts: Number of hosts.
        ranks_per_host: Number of ranks per host.
        inside: Link between ranks of a host.
        between: Link of a host to the network, which all of its ranks share.
    """

    num_hosts: int
    ranks_per_host: int
    inside: Link
    between: Link

    @classmethod
    def of_ranks(cls, num_ranks: int, ranks_per_host: int, inside: Link, between: Link) -> "Cluster":
        """Creates a cluster with a number of ranks, on the necessary number of hosts or a part of one host.

        Raises:
            ValueError: If the last host would have fewer ranks than the others.
        """
        on_each = min(num_ranks, ranks_per_host)
        if num_ranks % on_each:
            raise ValueError(f"{num_ranks} ranks do not fill a whole number of hosts with {on_each} ranks each")
        return cls(num_ranks // on_each, on_each, inside, between)

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all hosts."""
        return self.num_hosts * self.ranks_per_host

    @property
    def slowest(self) -> Link:
        """Slowest link of a ring over all ranks."""
        return self.between if self.num_hosts > 1 else self.inside


def two_levels(cluster: Cluster, num_bytes: float, between: Callable[[int, float, Link], float] | None = None) -> float:
    """Returns the seconds of a hierarchical all-reduce: a sum inside each host, an exchange between hosts, a broadcast.

    After a reduce-scatter, each rank of a host has a share of the sums. All ranks exchange their shares between hosts
    at the same time, so that each has a share of the network link. An all-gather collects the shares inside each host.

    Args:
        cluster: The ranks.
        num_bytes: Number of bytes of each rank.
        between: Function that returns the seconds of the exchange of a share between hosts: number of hosts, bytes
            before compression, link. None for a ring.
    """
    share = num_bytes / cluster.ranks_per_host
    inside_s = 2 * all_gather(cluster.ranks_per_host, share, cluster.inside)
    if cluster.num_hosts == 1:
        return inside_s
    return inside_s + (between or ring)(cluster.num_hosts, share, cluster.between.shared_by(cluster.ranks_per_host))


class Bucket(NamedTuple):
    """Gradients that are exchanged together: their bytes, and the seconds until the backward pass has computed them."""

    num_bytes: float
    ready_s: float


@dataclass(frozen=True)
class Computation:
    """A step of one rank without exchanges, while the other ranks compute.

    Attributes:
        rest_s: Seconds outside the backward pass: batches, forward pass, optimizer.
        backward_s: Seconds of the backward pass.
        buckets: Buckets in the order of their exchange.
    """

    rest_s: float
    backward_s: float
    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, seconds: float, num_bytes: float, backward_share: float = 2 / 3) -> "Computation":
        """Creates a step whose backward pass computes gradients at a constant rate.

        Args:
            seconds: Duration of the step.
            num_bytes: Number of bytes of the gradients, in buckets of DDP's default sizes.
            backward_share: Share of the backward pass in the step; it takes about twice the time of the forward pass.
        """
        backward_s, buckets, done = backward_share * seconds, [], 0.0
        for size in bucket_sizes(num_bytes):
            done += size
            buckets.append(Bucket(size, backward_s * done / num_bytes))
        return cls(seconds - backward_s, backward_s, tuple(buckets))

    @property
    def seconds(self) -> float:
        """Number of seconds of the step."""
        return self.rest_s + self.backward_s


def bucket_sizes(num_bytes: float) -> Iterable[float]:
    """Returns the bucket sizes of DDP: a small first bucket, so that the exchange starts early, and larger buckets."""
    limit: float = FIRST_BUCKET_NUM_BYTES
    while num_bytes > 0:
        yield min(limit, num_bytes)
        num_bytes -= limit
        limit = BUCKET_NUM_BYTES


def contended(compute_s: float, num_ranks: int, num_cores: int) -> float:
    """Returns the seconds of a computation with one thread per rank, if ranks share only the cores of a host.

    Args:
        compute_s: Seconds of one rank alone.
        num_ranks: Number of ranks on the host.
        num_cores: Number of cores of the host.
    """
    return compute_s * max(1.0, num_ranks / num_cores)


def step(computation: Computation, cost: Cost, rare_s: float = 0.0, *, overlaps: bool = True) -> float:
    """Returns the seconds of a training step.

    Buckets are exchanged one after another. The exchange of a bucket starts when the bucket is complete and the
    previous exchange has ended. After the backward pass, the step waits for the remaining exchanges, at least for that
    of the last bucket.

    Args:
        computation: The step without exchanges.
        cost: Function that returns the seconds of the exchange of a bucket.
        rare_s: Additional seconds per step, such as those of models that are exchanged once in many steps.
        overlaps: Whether exchanges overlap with the backward pass; not if they use the cores that compute.
    """
    if not overlaps:
        return computation.seconds + sum(cost(bucket.num_bytes) for bucket in computation.buckets) + rare_s
    through_s = 0.0
    for bucket in computation.buckets:
        through_s = max(through_s, bucket.ready_s) + cost(bucket.num_bytes)
    return computation.rest_s + max(computation.backward_s, through_s) + rare_s


def efficiency(alone_s: float, step_s: float) -> float:
    """Returns the efficiency of weak scaling: the work of a rank among others over its work alone in the same time."""
    return alone_s / step_s

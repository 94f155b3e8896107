"""What exchanges and training steps cost by the alpha-beta model: pure functions, which measure nothing.

A message of n bytes takes alpha + n * beta seconds: a latency, and a time per byte (Hockney 1994, "The communication
challenge for MPP: Intel Paragon and Meiko CS-2"). An algorithm takes the sum over the messages that one rank sends one
after the other. What adding up costs is not told apart from sending: where links are measured by all-reduces, beta has
it.

What the model does not know: switches that other traffic shares, ranks that are late by chance, and messages too short
for a link to reach its rate.

Sources:
    Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
    Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

#: What DDP exchanges at once: a first bucket of 1 MiB, then those of 25 MiB.
FIRST_BUCKET_NUM_BYTES, BUCKET_NUM_BYTES = 2**20, 25 * 2**20

#: Seconds that an exchange of so many bytes of gradients takes.
Cost = Callable[[float], float]


@dataclass(frozen=True)
class Link:
    """What joins two ranks.

    Attributes:
        latency_s: alpha, seconds per message, however short.
        s_per_byte: beta, seconds per byte.
    """

    latency_s: float
    s_per_byte: float

    @classmethod
    def of(cls, latency_us: float, bandwidth_gbit: float) -> "Link":
        """From microseconds and gigabits (10^9) per second."""
        return cls(latency_us * 1e-6, 8e-9 / bandwidth_gbit)

    @property
    def latency_us(self) -> float:
        """Microseconds per message."""
        return self.latency_s * 1e6

    @property
    def bandwidth_gbit(self) -> float:
        """Gigabits (10^9) per second."""
        return 8e-9 / self.s_per_byte

    def shared_by(self, num_ranks: int) -> "Link":
        """What each of several ranks has of it that send at once: the latency, and its share of the bandwidth."""
        return replace(self, s_per_byte=self.s_per_byte * num_ranks)

    def messages_s(self, num_messages: float, num_bytes: float) -> float:
        """Seconds for messages, one after the other, of so many bytes altogether."""
        return num_messages * self.latency_s + num_bytes * self.s_per_byte


class Sample(NamedTuple):
    """What was measured of an exchange: messages and bytes that a rank sends one after the other, and seconds."""

    num_messages: float
    num_bytes: float
    seconds: float


def fit(samples: Sequence[Sample]) -> Link:
    """The link that explains samples best: least squares of what the model misses, relative to what was measured.

    Relative, or the longest messages alone would decide, and alpha would be what is left of them.

    Raises:
        ValueError: If there are not two different sizes.
    """
    rows = [(one.num_messages / one.seconds, one.num_bytes / one.seconds) for one in samples]
    mm, mb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    m, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = mm * bb - mb * mb
    if determinant <= 1e-12 * mm * bb:
        raise ValueError("a link is known by messages of at least two different sizes")
    latency_s, s_per_byte = (bb * m - mb * b) / determinant, (mm * b - mb * m) / determinant
    if latency_s < 0:
        return Link(0.0, b / bb)
    return Link(latency_s, s_per_byte) if s_per_byte > 0 else Link(m / mm, 0.0)


def ring(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Seconds of an all-reduce in a ring.

    Each rank passes on 1/p of the bytes p - 1 times while they are added up, and p - 1 times while the sums go round:
    the fewest bytes that a rank can send, and the most messages (Patarasuk and Yuan 2009).

    Args:
        num_ranks: p.
        num_bytes: Of what each rank has.
        link: Between neighbours. Of hosts with several ranks each it is the cable, if neighbours in the ring are
            neighbours on their host: then one rank of a host sends by it, and all wait for that.
    """
    return 2 * all_gather(num_ranks, num_bytes / num_ranks, link)


def all_gather(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Seconds until each rank has what all have, passed on in a ring: what arrives grows with the number of ranks.

    Read backwards it is a reduce-scatter of ``num_ranks * num_bytes``, which takes as long (Thakur et al. 2005).

    Args:
        num_ranks: p.
        num_bytes: Of what each rank has to give.
        link: Between neighbours.
    """
    return link.messages_s(num_ranks - 1, (num_ranks - 1) * num_bytes)


def halving_doubling(num_ranks: int, num_bytes: float, link: Link) -> float:
    """Seconds of an all-reduce by a tree: recursive halving, then recursive doubling (Thakur et al. 2005).

    Partners at distance 1, 2, 4, ... exchange a half, a quarter, an eighth of the bytes, and bring the sums together in
    the opposite order: the bytes of a ring in 2·log2(p) messages. Ranks beyond the largest power of two give theirs to
    a partner first, and are given the sums at the end.

    Args:
        num_ranks: p.
        num_bytes: Of what each rank has.
        link: Between any two, all at once.
    """
    num_doublings = num_ranks.bit_length() - 1
    power = 2**num_doublings
    within = link.messages_s(2 * num_doublings, 2 * (power - 1) / power * num_bytes)
    return within + (link.messages_s(2, 2 * num_bytes) if power < num_ranks else 0.0)


@dataclass(frozen=True)
class Cluster:
    """Hosts with the same number of ranks each.

    Attributes:
        num_hosts: Of them.
        ranks_per_host: On each.
        inside: Between ranks of a host.
        between: The cable of a host, which all of its ranks share.
    """

    num_hosts: int
    ranks_per_host: int
    inside: Link
    between: Link

    @classmethod
    def of_ranks(cls, num_ranks: int, ranks_per_host: int, inside: Link, between: Link) -> "Cluster":
        """As many hosts as are needed, or a part of one.

        Raises:
            ValueError: If the last host would have fewer ranks than the others.
        """
        on_each = min(num_ranks, ranks_per_host)
        if num_ranks % on_each:
            raise ValueError(f"{num_ranks} ranks are no whole number of hosts with {on_each} ranks each")
        return cls(num_ranks // on_each, on_each, inside, between)

    @property
    def num_ranks(self) -> int:
        """Of all hosts."""
        return self.num_hosts * self.ranks_per_host

    @property
    def slowest(self) -> Link:
        """The link that a ring over all ranks waits for."""
        return self.between if self.num_hosts > 1 else self.inside


def two_levels(cluster: Cluster, num_bytes: float, between: Callable[[int, float, Link], float] | None = None) -> float:
    """Seconds of an all-reduce that adds up inside each host, exchanges between hosts, and spreads inside.

    A reduce-scatter leaves each rank of a host with a share of the sums; each carries its share between the hosts, all
    at once, so that each has a share of the cable; an all-gather brings the shares together.

    Args:
        cluster: The ranks.
        num_bytes: Of what each rank has.
        between: Seconds for the exchange between so many hosts, of a share of so many bytes, over a link; a ring's if
            None. One that compresses is given the bytes before that.
    """
    share = num_bytes / cluster.ranks_per_host
    inside_s = 2 * all_gather(cluster.ranks_per_host, share, cluster.inside)
    if cluster.num_hosts == 1:
        return inside_s
    return inside_s + (between or ring)(cluster.num_hosts, share, cluster.between.shared_by(cluster.ranks_per_host))


class Bucket(NamedTuple):
    """Gradients that are exchanged at once: their bytes, and the seconds after which the backward pass has them."""

    num_bytes: float
    ready_s: float


@dataclass(frozen=True)
class Computation:
    """A step of one rank while as many compute at once as will, without what they exchange.

    Attributes:
        rest_s: Seconds of all that is no backward pass: batches, forward pass, optimizer.
        backward_s: Seconds of the backward pass.
        buckets: In the order of their exchange.
    """

    rest_s: float
    backward_s: float
    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, seconds: float, num_bytes: float, backward_share: float = 2 / 3) -> "Computation":
        """A step whose backward pass brings forth gradients at an even pace.

        Args:
            seconds: Of the step.
            num_bytes: Of the gradients, in buckets of DDP's default sizes.
            backward_share: How much of the step the backward pass takes; it is about twice as long as the forward pass.
        """
        backward_s, buckets, done = backward_share * seconds, [], 0.0
        for size in bucket_sizes(num_bytes):
            done += size
            buckets.append(Bucket(size, backward_s * done / num_bytes))
        return cls(seconds - backward_s, backward_s, tuple(buckets))

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.rest_s + self.backward_s


def bucket_sizes(num_bytes: float) -> Iterable[float]:
    """How DDP divides gradients: a short bucket, so that the exchange begins early, long ones, and what is left."""
    limit: float = FIRST_BUCKET_NUM_BYTES
    while num_bytes > 0:
        yield min(limit, num_bytes)
        num_bytes -= limit
        limit = BUCKET_NUM_BYTES


def contended(compute_s: float, num_ranks: int, num_cores: int) -> float:
    """Seconds of a computation of one thread per rank, if ranks share the cores of a host and nothing else.

    Args:
        compute_s: Of one rank alone.
        num_ranks: On the host.
        num_cores: Of the host.
    """
    return compute_s * max(1.0, num_ranks / num_cores)


def step(computation: Computation, cost: Cost, rare_s: float = 0.0, *, overlaps: bool = True) -> float:
    """Seconds of a training step.

    Buckets are exchanged one after another, each as soon as it is there and the one before is through; what is not
    through when the backward pass ends is waited for. The last bucket is complete only then, so it always is.

    Args:
        computation: Without exchanges.
        cost: Of the exchange of a bucket.
        rare_s: What comes on top, such as models that are exchanged once in many steps: per step.
        overlaps: Whether exchanges go on beside the backward pass. They do not where they need the cores that compute.
    """
    if not overlaps:
        return computation.seconds + sum(cost(bucket.num_bytes) for bucket in computation.buckets) + rare_s
    through_s = 0.0
    for bucket in computation.buckets:
        through_s = max(through_s, bucket.ready_s) + cost(bucket.num_bytes)
    return computation.rest_s + max(computation.backward_s, through_s) + rare_s


def efficiency(alone_s: float, step_s: float) -> float:
    """Of weak scaling: what a rank gets done beside the others, over what it gets done alone in the same time."""
    return alone_s / step_s

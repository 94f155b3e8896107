"""Advice: one sentence on the bottleneck of a job, and the argument that would change it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_strategies_ext.monitoring.analysis import (
    RankTimes,
    SlowestRank,
    exposed_share,
    mean_over_ranks,
    share,
    slowest_of,
)

#: Share of a step below which a bottleneck is not reported.
_MIN_REPORTED_SHARE = 0.1
#: Size in bytes below which round trips, not bandwidth, dominate the time of an exchange.
_LATENCY_BOUND_NUM_BYTES = 1 << 20
_MIN_HIDDEN_SHARE = 0.5


@dataclass(frozen=True)
class JobTraits:
    """Properties of a job, other than times, on which advice depends.

    Attributes:
        compressions: Values of the strategy's argument ``compression`` that would reduce the bytes exchanged.
        num_buckets: Number of gradient buckets; 0 if unknown.
        num_hosts: Number of hosts of the ranks.
        is_stock: Whether the strategy is one of Lightning's.
        is_compressed: Whether compressed values are exchanged instead of gradients; compression takes time, too.
    """

    compressions: tuple[str, ...] = ()
    num_buckets: int = 0
    num_hosts: int = 1
    is_stock: bool = False
    is_compressed: bool = False


class Bottleneck(NamedTuple):
    """A cause that makes steps longer.

    Attributes:
        share: Share of the step, from 0 to 1.
        text: Description of the cause and its remedy.
    """

    share: float
    text: str


def advise(times: Sequence[RankTimes], traits: JobTraits) -> str:
    """Returns one line on the bottleneck of the job, and the argument that would change it.

    Args:
        times: Times of all ranks, over the whole training.
        traits: Properties of the job.
    """
    bottlenecks = [each for each in _bottlenecks(times, traits) if each.share >= _MIN_REPORTED_SHARE]
    if bottlenecks:
        return max(bottlenecks, key=lambda each: each.share).text
    if len(times) == 1:
        return "One process: nothing is exchanged, and computation is the bottleneck."
    exposed = exposed_share(times)
    return f"Computation is the bottleneck: a step waits for communication for {_percent(exposed)} of its time."


def _bottlenecks(times: Sequence[RankTimes], traits: JobTraits) -> Iterator[Bottleneck]:
    step_ms = mean_over_ranks(times, "step_ms")
    slowest = slowest_of(times)
    slowest_share = 0.0
    if slowest is not None:
        slowest_share = share(slowest.lag_ms, step_ms)
        yield Bottleneck(slowest_share, _slowest_rank_advice(slowest, step_ms))
    data_share = share(min(each.data_ms for each in times), step_ms)
    yield Bottleneck(
        data_share,
        f"{'Every rank waits' if len(times) > 1 else 'The step waits'} for data for {_percent(data_share)} of a step."
        " Give the DataLoader more workers (`num_workers=...`, `persistent_workers=True`), or do less per sample.",
    )
    waiting_share = share(mean_over_ranks(times, "waiting_ms"), step_ms)
    if slowest_share < waiting_share / 2:
        yield Bottleneck(
            waiting_share,
            f"Ranks wait for each other in turns, for {_percent(waiting_share)} of a step: their batches take different"
            " times. Give them batches of similar cost (a sampler that sorts by length), or let them exchange less"
            " often: `Trainer(accumulate_grad_batches=...)`"
            + (", `compression='localsgd'`." if "localsgd" in traits.compressions else "."),
        )
    transfer_share = share(mean_over_ranks(times, "transfer_ms"), step_ms)
    yield Bottleneck(
        transfer_share,
        f"The network is the bottleneck: a step waits for transfers for {_percent(transfer_share)} of its time, with"
        f" {_size(mean_over_ranks(times, 'num_bytes'))} per step. {_network_advice(times, traits)}",
    )


def _slowest_rank_advice(slowest: SlowestRank, step_ms: float) -> str:
    rank, waited = slowest.rank, _percent(share(slowest.lag_ms, step_ms))
    names = {"data": "data loading", "forward": "the forward pass", "backward": "the backward pass"}
    remedies = {
        "data": f"Give rank {rank}'s DataLoader more workers (`num_workers=...`), or faster storage.",
        "forward": f"Give rank {rank} batches of the same cost as those of the other ranks, or check what else its"
        " device computes.",
        "optimizer": f"Check what only rank {rank} does in hooks and callbacks after its backward pass.",
        "other": f"Check what only rank {rank} does between steps: logging (`log_every_n_steps=...`), checkpoints"
        " (`ModelCheckpoint(every_n_train_steps=...)`), callbacks.",
    }
    remedies["backward"] = remedies["forward"]
    phase_text = names.get(slowest.phase, "work between two steps" if slowest.phase == "other" else "optimizer steps")
    return (
        f"Rank {rank} is the bottleneck: other ranks wait {slowest.lag_ms:.3g} ms per step for it ({waited} of the"
        f" step). It is slower by {slowest.phase_lag_ms:.3g} ms in {phase_text}. {remedies[slowest.phase]}"
    )


def _network_advice(times: Sequence[RankTimes], traits: JobTraits) -> str:
    hidden = share(mean_over_ranks(times, "hidden_ms"), mean_over_ranks(times, "communication_ms"))
    num_bytes = mean_over_ranks(times, "num_bytes")
    if traits.is_stock and traits.num_hosts == 1:
        return (
            "Use `strategy='ddp_ext'`, which exchanges over shared memory on CPUs, and waits less for single"
            " collectives."
        )
    if num_bytes < _LATENCY_BOUND_NUM_BYTES:
        compression_text = " and compression" if traits.is_compressed else ""
        return (
            f"For so few bytes, the step waits for latency{compression_text}, not for bandwidth. Exchange less often"
            " (`Trainer(accumulate_grad_batches=...)`), or increase the batch size, which makes the step longer."
        )
    if traits.is_stock and traits.num_hosts > 1:
        hierarchy_advice = "On CPUs `strategy='ddp_ext'` sums on each host before it exchanges between hosts, and "
        compression_advice = "`strategy='ddp_ext_bf16'`, or another `compression` of `ddp_ext`, exchanges less."
        return hierarchy_advice + compression_advice if len(times) > traits.num_hosts else compression_advice
    if traits.compressions and traits.num_hosts > 1:
        return f"Use `compression=...` to exchange less: {', '.join(map(repr, traits.compressions))}."
    if traits.num_buckets == 1 and hidden < _MIN_HIDDEN_SHARE:
        return (
            "Use a smaller `bucket_cap_mb=...`, so that the exchange begins while the backward pass still"
            " computes; 'auto' finds a size."
        )
    return (
        "Exchange less often (`Trainer(accumulate_grad_batches=...)`), or increase the batch size, which makes"
        " the step longer."
    )


def _percent(part: float) -> str:
    return f"{100 * part:.2g} %" if part < 0.01 else f"{100 * part:.0f} %"


def _size(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"

"""Analysis of recorded times. Inputs are in nanoseconds, results in milliseconds.

A window has some tens of rows, for which loops are faster than arrays.

An exchange on one rank::

    begin ............ ready ............ latest ............ end
      |    hidden        |     waiting      |     transfer      |
                         |<---------------- exposed ----------->|

At ``ready``, this rank has computed its whole contribution and only waits. At ``latest``, the last rank has; no
collective that needs its contribution can end earlier. The exposed time until ``latest`` is therefore spent waiting for
other ranks, and the time after it on the transfer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isnan, nan
from statistics import median

from lightning_strategies_ext.monitoring.records import IN_BACKWARD, MODEL_EXCHANGE, NUM_WARMUP_STEPS, Window

#: Phases of a step on a rank, without the time in which it waits for exchanges. "data" lasts until the batch is on its
#: device; "other" is the time between two batches: loggers, checkpoints, callbacks.
PHASES = ("data", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True)
class RankTimes:
    """Mean times of one rank per optimizer step, in milliseconds.

    Attributes:
        rank: Global rank.
        num_steps: Number of observed steps. ``num_bytes`` and times of model exchanges are means over all steps.
        num_bytes: Number of bytes that the rank contributes to exchanges.
        step_ms: Time of the whole step.
        data_ms: Time of the phase "data", see :data:`PHASES`.
        forward_ms: Time of the phase "forward".
        backward_ms: Time of the phase "backward".
        optimizer_ms: Time of the phase "optimizer".
        other_ms: Time of the phase "other".
        communication_ms: Time from the beginning to the end of exchanges.
        hidden_ms: Part of ``communication_ms`` in which this rank still computed.
        exposed_ms: Rest of ``communication_ms``, for which the step waits.
        waiting_ms: Part of ``exposed_ms`` in which this rank waits for other ranks.
        transfer_ms: Rest of ``exposed_ms``.
    """

    rank: int
    num_steps: int
    num_bytes: float
    step_ms: float
    data_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    other_ms: float
    communication_ms: float
    hidden_ms: float
    exposed_ms: float
    waiting_ms: float
    transfer_ms: float

    def phase_ms(self, phase: str) -> float:
        """Returns the time of a phase by its name."""
        return float(getattr(self, f"{phase}_ms"))


_MEANS = tuple(field.name for field in fields(RankTimes) if field.name not in ("rank", "num_steps"))
_TIMES = tuple(field.name for field in fields(RankTimes) if field.name.endswith("_ms"))


@dataclass(frozen=True)
class SlowestRank:
    """The rank for which other ranks wait most.

    Attributes:
        rank: Global rank.
        lag_ms: Mean waiting time of the other ranks, minus that of this rank.
        phase: Phase in which its time exceeds that of the other ranks most.
        phase_lag_ms: Difference in this phase.
    """

    rank: int
    lag_ms: float
    phase: str
    phase_lag_ms: float


def times_of(windows: Sequence[Window]) -> list[RankTimes]:
    """Returns the mean times of all ranks from their records of one window, in the given order."""
    waiting = waiting_times(windows)
    return [_times_of(window, waiting[window.rank]) for window in windows]


def clock_offsets(windows: Sequence[Window]) -> dict[int, int]:
    """Returns by how much each rank's clock is ahead of the first rank's, in nanoseconds; 0 on the same host.

    An all-reduce ends at nearly the same time on all hosts, so the offset is the median difference of these times.
    """
    return _offsets(windows, _in_common(windows))


def waiting_times(windows: Sequence[Window]) -> dict[int, list[float]]:
    """Returns each rank's waiting time for other ranks in each of its exchanges, in nanoseconds; NaN if unknown."""
    in_common = _in_common(windows)
    offsets = _offsets(windows, in_common)
    ready = [
        [ready_ns - offsets[window.rank] for _, ready_ns, _ in own]
        for window, own in zip(windows, in_common, strict=True)
    ]
    latest = [max(rank_times) for rank_times in zip(*ready, strict=True)]
    found = {}
    for window, own, own_ready in zip(windows, in_common, ready, strict=True):
        found[window.rank] = waited = [nan] * len(window.exchanges)
        for (index, ready_ns, end_ns), aligned_ns, latest_ns in zip(own, own_ready, latest, strict=True):
            waited[index] = min(latest_ns - aligned_ns, max(end_ns - ready_ns, 0))
    return found


def combined(times: Sequence[RankTimes]) -> RankTimes:
    """Returns the mean times of one rank over several windows."""
    times = [each for each in times if each.num_steps] or times[:1]
    weights = [max(each.num_steps, 1) for each in times]
    means = {
        name: sum(getattr(each, name) * weight for each, weight in zip(times, weights, strict=True)) / sum(weights)
        for name in _MEANS
    }
    return RankTimes(times[0].rank, sum(each.num_steps for each in times), **means)


def slowest_of(times: Sequence[RankTimes]) -> SlowestRank | None:
    """Returns the rank for which other ranks wait most; None if there is only one rank."""
    if len(times) < 2:
        return None
    slowest = min(times, key=lambda each: each.waiting_ms)
    others = [each for each in times if each is not slowest]
    by_phase = {phase: slowest.phase_ms(phase) - mean_over_ranks(others, f"{phase}_ms") for phase in PHASES}
    phase = max(by_phase, key=lambda name: by_phase[name])
    lag_ms = mean_over_ranks(others, "waiting_ms") - slowest.waiting_ms
    return SlowestRank(slowest.rank, lag_ms, phase, by_phase[phase])


def mean_over_ranks(times: Sequence[RankTimes], name: str) -> float:
    """Returns the mean of an attribute of :class:`RankTimes` over ranks."""
    return float(sum(getattr(each, name) for each in times) / len(times))


def logged_metrics(times: Sequence[RankTimes]) -> dict[str, float]:
    """Returns the metrics of a window for loggers: means over ranks, and the slowest rank."""
    values = {f"communication/{name}": mean_over_ranks(times, name) for name in _TIMES}
    values["communication/bytes"] = mean_over_ranks(times, "num_bytes")
    values["communication/exposed_share"] = exposed_share(times)
    slowest = slowest_of(times)
    if slowest is not None:
        values |= {"communication/slowest_rank": slowest.rank, "communication/slowest_rank_lag_ms": slowest.lag_ms}
    return values


def exposed_share(times: Sequence[RankTimes]) -> float:
    """Returns the share of a step that is spent waiting for exchanges, as a mean over ranks."""
    return share(mean_over_ranks(times, "exposed_ms"), mean_over_ranks(times, "step_ms"))


def share(part_ms: float, whole_ms: float) -> float:
    """Returns a part divided by the whole; 0 if the whole is 0."""
    return part_ms / whole_ms if whole_ms > 0 else 0.0


class _Sums:
    """Sums over observed batches, in nanoseconds."""

    def __init__(self, batches: list[tuple[int, ...]]) -> None:
        self.data = self.forward = self.backward = self.optimizer = 0
        others = []
        for _, previous_end, fetch, begin, backward_begin, _, end, backward in batches:
            forward = (backward_begin or end) - begin
            self.data += begin - fetch
            self.forward += forward
            self.backward += backward
            self.optimizer += end - begin - forward - backward
            if previous_end:
                others.append(fetch - previous_end)
        self.other = sum(others) * len(batches) / len(others) if others else 0.0
        self.step = self.data + self.forward + self.backward + self.optimizer + self.other


class _ExchangeMeans:
    """Means per step over the exchanges of a window, in nanoseconds.

    Recorded gradient exchanges represent those of all steps; model exchanges are recorded in all steps.
    """

    def __init__(self, exchanges: list[tuple[int, ...]], waiting: list[float], num_steps: int) -> None:
        observed = {step for step, _, _, _, kind in exchanges if kind != MODEL_EXCHANGE}
        self.hidden = self.exposed = self.exposed_in_backward = self.waiting = 0.0
        for (_, begin, ready, end, kind), waited in zip(exchanges, waiting, strict=True):
            num = num_steps if kind == MODEL_EXCHANGE else len(observed)
            exposed = max(0, end - max(ready, begin)) / num
            self.hidden += max(0, min(ready, end) - begin) / num
            self.exposed += exposed
            self.exposed_in_backward += exposed if kind == IN_BACKWARD else 0
            self.waiting += 0 if isnan(waited) else waited / num


def _times_of(window: Window, waiting: list[float]) -> RankTimes:
    num_steps, batches, exchanges = window.num_steps, window.batches.tolist(), window.exchanges.tolist()
    num_bytes = window.num_bytes / max(num_steps, 1)
    if window.number == 0 and any(batch[0] >= NUM_WARMUP_STEPS for batch in batches):
        batches = [batch for batch in batches if batch[0] >= NUM_WARMUP_STEPS]
        waiting = [each for each, exchange in zip(waiting, exchanges, strict=True) if exchange[0] >= NUM_WARMUP_STEPS]
        exchanges = [exchange for exchange in exchanges if exchange[0] >= NUM_WARMUP_STEPS]
        num_steps -= NUM_WARMUP_STEPS
    sums, exchanged = _Sums(batches), _ExchangeMeans(exchanges, waiting, max(num_steps, 1))
    num_observed = len({batch[0] for batch in batches})
    to_ms = 1e6 * max(num_observed, 1)
    exposed_ms, in_backward_ms = exchanged.exposed / 1e6, exchanged.exposed_in_backward / 1e6
    return RankTimes(
        rank=window.rank,
        num_steps=num_observed,
        num_bytes=num_bytes,
        step_ms=sums.step / to_ms,
        data_ms=sums.data / to_ms,
        forward_ms=sums.forward / to_ms,
        backward_ms=max(0.0, sums.backward / to_ms - in_backward_ms),
        optimizer_ms=max(0.0, sums.optimizer / to_ms - (exposed_ms - in_backward_ms)),
        other_ms=sums.other / to_ms,
        communication_ms=exchanged.hidden / 1e6 + exposed_ms,
        hidden_ms=exchanged.hidden / 1e6,
        exposed_ms=exposed_ms,
        waiting_ms=exchanged.waiting / 1e6,
        transfer_ms=exposed_ms - exchanged.waiting / 1e6,
    )


def _offsets(windows: Sequence[Window], in_common: list[list[tuple[int, int, int]]]) -> dict[int, int]:
    offsets = {window.rank: 0 for window in windows}
    for window, own in zip(windows, in_common, strict=True):
        if window.host != windows[0].host and own:
            ahead = [end - first_end for (_, _, end), (_, _, first_end) in zip(own, in_common[0], strict=True)]
            offsets[window.rank] = int(median(ahead))
    return offsets


def _in_common(windows: Sequence[Window]) -> list[list[tuple[int, int, int]]]:
    """Returns the exchanges that all ranks have recorded, by rank in the same order: index, ``ready`` and ``end``."""
    exchanges: list[list[tuple[int, ...]]] = [window.exchanges.tolist() for window in windows]
    keys = [[(step, kind) for step, _, _, _, kind in own] for own in exchanges]
    found = [[(index, ready, end) for index, (_, _, ready, end, _) in enumerate(own)] for own in exchanges]
    if all(own == keys[0] for own in keys):
        return found
    by_key = [dict(zip(*own, strict=True)) for own in zip(keys, found, strict=True)]
    common = [key for key in by_key[0] if all(key in own for own in by_key)]
    return [[own[key] for key in common] for own in by_key]

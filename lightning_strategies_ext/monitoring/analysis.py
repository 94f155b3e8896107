"""What follows from the times that ranks have noted. Functions of numbers, in nanoseconds, that give milliseconds.

Each window is of some tens of rows, for which loops are faster than arrays.

An exchange on one rank::

    begin ............ ready ............ latest ............ end
      |    hidden        |     waiting      |     transfer      |
                         |<---------------- exposed ----------->|

``ready`` is when this rank has computed all that it contributes and has nothing to do but wait, ``latest`` when the
last rank has: before, no collective that needs its contribution can end. So the exposed part is waiting for other ranks
up to there, and transfer from there on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isnan, nan
from statistics import median

from lightning_strategies_ext.monitoring.records import IN_BACKWARD, NUM_WARMUP_STEPS, OF_MODELS, Window

#: What a rank does in a step, without what it waits for exchanges. "data" is until the batch is there and on its
#: device, "other" is between two batches: loggers, checkpoints, what callbacks do.
PHASES = ("data", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True)
class RankTimes:
    """Means per optimizer step of one rank, in milliseconds.

    Attributes:
        rank: Global rank.
        num_steps: How many observed steps they are of; ``num_bytes``, and what is of models, of all.
        num_bytes: Handed to exchanges.
        step_ms: The whole step.
        data_ms: A phase, see :data:`PHASES`; so are the next four.
        forward_ms: See above.
        backward_ms: See above.
        optimizer_ms: See above.
        other_ms: See above.
        communication_ms: From the begin of the exchange to its end.
        hidden_ms: Of that, while this rank still computed.
        exposed_ms: Of that, the rest, which the step waits for.
        waiting_ms: Of the exposed part, waiting for another rank to come.
        transfer_ms: Of the exposed part, the rest.
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
        """The time of a phase by its name."""
        return float(getattr(self, f"{phase}_ms"))


_MEANS = tuple(field.name for field in fields(RankTimes) if field.name not in ("rank", "num_steps"))
_TIMES = tuple(field.name for field in fields(RankTimes) if field.name.endswith("_ms"))


@dataclass(frozen=True)
class Slowest:
    """The rank that the others wait for.

    Attributes:
        rank: Global rank.
        by_ms: How much longer the others wait for it, on average, than it for them.
        phase: In which it differs most from the others.
        phase_by_ms: By how much.
    """

    rank: int
    by_ms: float
    phase: str
    phase_by_ms: float


def times_of(windows: Sequence[Window]) -> list[RankTimes]:
    """Means of the same window of all ranks, in the order of ranks given."""
    waiting = waits(windows)
    return [_times_of(window, waiting[window.rank]) for window in windows]


def clock_offsets(windows: Sequence[Window]) -> dict[int, int]:
    """How far the clock of each rank is ahead of the first one's, in nanoseconds; 0 on the same host.

    Ranks of other hosts end the same all-reduce at nearly the same time, so the median difference of ends is taken.
    """
    return _offsets(windows, _in_common(windows))


def waits(windows: Sequence[Window]) -> dict[int, list[float]]:
    """By rank, how long it waits for others in each of its exchanges, in nanoseconds; NaN where that is not known."""
    in_common = _in_common(windows)
    offsets = _offsets(windows, in_common)
    ready = [[at - offsets[window.rank] for _, at, _ in own] for window, own in zip(windows, in_common, strict=True)]
    latest = [max(of_ranks) for of_ranks in zip(*ready, strict=True)]
    found = {}
    for window, own, own_ready in zip(windows, in_common, ready, strict=True):
        found[window.rank] = waited = [nan] * len(window.exchanges)
        for (place, at, end), is_ready, last in zip(own, own_ready, latest, strict=True):
            waited[place] = min(last - is_ready, max(end - at, 0))
    return found


def combined(times: Sequence[RankTimes]) -> RankTimes:
    """One rank's means over several windows."""
    times = [each for each in times if each.num_steps] or times[:1]
    weights = [max(each.num_steps, 1) for each in times]
    means = {
        name: sum(getattr(each, name) * weight for each, weight in zip(times, weights, strict=True)) / sum(weights)
        for name in _MEANS
    }
    return RankTimes(times[0].rank, sum(each.num_steps for each in times), **means)


def slowest_of(times: Sequence[RankTimes]) -> Slowest | None:
    """The rank that the others wait for most; None where there is one rank."""
    if len(times) < 2:
        return None
    slowest = min(times, key=lambda each: each.waiting_ms)
    others = [each for each in times if each is not slowest]
    by_phase = {phase: slowest.phase_ms(phase) - mean_over_ranks(others, f"{phase}_ms") for phase in PHASES}
    phase = max(by_phase, key=lambda name: by_phase[name])
    by_ms = mean_over_ranks(others, "waiting_ms") - slowest.waiting_ms
    return Slowest(slowest.rank, by_ms, phase, by_phase[phase])


def mean_over_ranks(times: Sequence[RankTimes], name: str) -> float:
    """The mean of an attribute of :class:`RankTimes`."""
    return float(sum(getattr(each, name) for each in times) / len(times))


def logged(times: Sequence[RankTimes]) -> dict[str, float]:
    """What a logger gets of a window: means over ranks, and the slowest rank."""
    values = {f"communication/{name}": mean_over_ranks(times, name) for name in _TIMES}
    values["communication/bytes"] = mean_over_ranks(times, "num_bytes")
    values["communication/exposed_share"] = exposed_share(times)
    slowest = slowest_of(times)
    if slowest is not None:
        values |= {"communication/slowest_rank": slowest.rank, "communication/slowest_by_ms": slowest.by_ms}
    return values


def exposed_share(times: Sequence[RankTimes]) -> float:
    """Of a step, what waits for exchanges; a mean over ranks."""
    return share(mean_over_ranks(times, "exposed_ms"), mean_over_ranks(times, "step_ms"))


def share(part_ms: float, whole_ms: float) -> float:
    """A part of a whole; 0 of nothing."""
    return part_ms / whole_ms if whole_ms > 0 else 0.0


class _Sums:
    """Sums over observed batches, in nanoseconds."""

    def __init__(self, batches: list[tuple[int, ...]]) -> None:
        self.data = self.forward = self.backward = self.rest = 0
        others = []
        for _, previous_end, fetch, begin, backward_begin, _, end, backward in batches:
            forward = (backward_begin or end) - begin
            self.data += begin - fetch
            self.forward += forward
            self.backward += backward
            self.rest += end - begin - forward - backward
            if previous_end:
                others.append(fetch - previous_end)
        self.other = sum(others) * len(batches) / len(others) if others else 0.0
        self.step = self.data + self.forward + self.backward + self.rest + self.other


class _Exchanged:
    """Means per step over the exchanges of a window, in nanoseconds.

    Exchanges of gradients stand for those of all steps, exchanges of models for themselves.
    """

    def __init__(self, exchanges: list[tuple[int, ...]], waiting: list[float], num_steps: int) -> None:
        observed = {step for step, _, _, _, kind in exchanges if kind != OF_MODELS}
        self.hidden = self.exposed = self.exposed_in_backward = self.waiting = 0.0
        for (_, begin, ready, end, kind), waited in zip(exchanges, waiting, strict=True):
            num = num_steps if kind == OF_MODELS else len(observed)
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
    sums, exchanged = _Sums(batches), _Exchanged(exchanges, waiting, max(num_steps, 1))
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
        optimizer_ms=max(0.0, sums.rest / to_ms - (exposed_ms - in_backward_ms)),
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
    """By rank, the exchanges that all ranks have noted, in the same order: where they are, ``ready`` and ``end``."""
    exchanges: list[list[tuple[int, ...]]] = [window.exchanges.tolist() for window in windows]
    keys = [[(step, kind) for step, _, _, _, kind in own] for own in exchanges]
    found = [[(place, ready, end) for place, (_, _, ready, end, _) in enumerate(own)] for own in exchanges]
    if all(own == keys[0] for own in keys):
        return found
    by_key = [dict(zip(*own, strict=True)) for own in zip(keys, found, strict=True)]
    common = [key for key in by_key[0] if all(key in own for own in by_key)]
    return [[own[key] for key in common] for own in by_key]

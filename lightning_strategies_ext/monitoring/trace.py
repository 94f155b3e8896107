"""Timeline of all ranks: as spans, and as a file for chrome://tracing or Perfetto."""

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import BinaryIO

from lightning_strategies_ext.monitoring.analysis import clock_offsets, waiting_times
from lightning_strategies_ext.monitoring.records import MODEL_EXCHANGE, Window

#: Rows of a rank.
TRAINING, EXCHANGE = "training", "exchange"
_ROWS = (TRAINING, EXCHANGE)
#: Maximum number of steps of a timeline.
_MAX_STEPS = 50


@dataclass(frozen=True)
class Span:
    """An activity of a rank.

    Attributes:
        rank: Global rank.
        row: Row of the rank: ``TRAINING`` or ``EXCHANGE``.
        name: Name of the activity.
        begin_ms: Time since the first span of all ranks, in milliseconds.
        duration_ms: Duration, in milliseconds.
        step: Optimizer step, from 0.
        waiting_ms: Time in an exchange in which this rank waited for other ranks, in milliseconds; None if unknown.
        hidden_ms: Time in an exchange in which this rank still computed, in milliseconds; None for other activities.
    """

    rank: int
    row: str
    name: str
    begin_ms: float
    duration_ms: float
    step: int
    waiting_ms: float | None = None
    hidden_ms: float | None = None


def spans_of(windows: Sequence[Window]) -> list[Span]:
    """Returns the spans of the last consecutive observed steps.

    Args:
        windows: Records of all ranks of one window.
    """
    observed = [window.observed(_MAX_STEPS) for window in windows]
    offsets, waiting = clock_offsets(observed), waiting_times(observed)
    begin = min((int(own.batches["fetch"][0]) - offsets[own.rank] for own in observed if len(own.batches)), default=0)
    spans: list[Span] = []
    for window in observed:
        origin = begin + offsets[window.rank]
        spans += [*_batch_spans(window, origin), *_exchange_spans(window, waiting[window.rank], origin)]
    return [span for span in spans if span.duration_ms > 0]


def write_trace(spans: Sequence[Span], path: Path) -> None:
    """Writes a Chrome trace: each rank is a process with a row for its training and a row for its exchanges."""
    events: list[dict[str, object]] = []
    for rank in sorted({span.rank for span in spans}):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}})
        for index, row in enumerate(_ROWS):
            events.append({"ph": "M", "pid": rank, "tid": index, "name": "thread_name", "args": {"name": row}})
    for span in spans:
        args = {"waiting_ms": span.waiting_ms, "hidden_ms": span.hidden_ms}
        events.append(
            {
                "ph": "X",
                "pid": span.rank,
                "tid": _ROWS.index(span.row),
                "name": span.name,
                "ts": round(1e3 * span.begin_ms, 3),
                "dur": round(1e3 * span.duration_ms, 3),
                "args": {"step": span.step, **{name: value for name, value in args.items() if value is not None}},
            }
        )
    with replacing(path) as file:
        file.write(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file that replaces ``path`` on success. A link at ``path`` is replaced, not followed."""
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(8)}")
    with open(temporary, "xb") as file:
        yield file
    os.replace(temporary, path)


def _batch_spans(window: Window, origin: int) -> Iterator[Span]:
    exchanges = {int(each["step"]): each for each in window.exchanges if each["kind"] != MODEL_EXCHANGE}
    for batch in window.batches:
        step, fetch, begin, end = (int(batch[name]) for name in ("step", "fetch", "begin", "end"))
        backward, backward_end = int(batch["backward_begin"]) or end, int(batch["backward_end"]) or end
        exchange = exchanges.get(step)
        ready, done = (0, 0) if exchange is None else (int(exchange["ready"]), int(exchange["end"]))
        parts = [("data", fetch, begin), ("forward", begin, backward)]
        if backward <= ready <= done <= end:
            parts += [("backward", backward, min(ready, backward_end)), ("waits for the exchange", ready, done)]
            parts += [("optimizer", max(done, backward_end), end)]
        else:
            parts += [("backward", backward, backward_end), ("optimizer", backward_end, end)]
        for name, start, stop in parts:
            yield Span(window.rank, TRAINING, name, (start - origin) / 1e6, (stop - start) / 1e6, step)


def _exchange_spans(window: Window, waiting: Sequence[float], origin: int) -> Iterator[Span]:
    for exchange, waited in zip(window.exchanges, waiting, strict=True):
        begin, ready, end = (int(exchange[name]) for name in ("begin", "ready", "end"))
        name = "models" if exchange["kind"] == MODEL_EXCHANGE else "gradients"
        waiting_ms = None if isnan(waited) else waited / 1e6
        hidden_ms = max(0, min(ready, end) - begin) / 1e6
        times_and_step = (begin - origin) / 1e6, (end - begin) / 1e6, int(exchange["step"])
        yield Span(window.rank, EXCHANGE, name, *times_and_step, waiting_ms, hidden_ms)

"""The analysis of recorded times, with manual numbers; these tests start no process."""

import json
from dataclasses import replace
from math import isnan
from typing import Any

import numpy as np
import pytest

from lightning_strategies_ext.monitoring.advice import JobTraits, advise
from lightning_strategies_ext.monitoring.analysis import (
    RankTimes,
    clock_offsets,
    combined,
    logged_metrics,
    slowest_of,
    times_of,
    waiting_times,
)
from lightning_strategies_ext.monitoring.records import (
    AFTER_BACKWARD,
    BATCH,
    EXCHANGE,
    IN_BACKWARD,
    MODEL_EXCHANGE,
    Window,
)
from lightning_strategies_ext.monitoring.trace import spans_of, write_trace

MS = 1_000_000
START = 1_700_000_000_000_000_000


def window(
    rank: int = 0,
    data: int = 1,
    kind: int = IN_BACKWARD,
    host: str = "a",
    ahead: int = 0,
    steps: range = range(10, 14),
    num_bytes: int = 400,
) -> Window:
    """Returns a window of steps of 20 ms: ``data`` ms of loading, 3 ms forward, 6 ms backward, and an exchange.

    Exchanges end at the same time on all ranks. They begin 2 ms before the end of the backward computation; the
    exchange of the last rank takes 1 ms from there on. Then the optimizer takes 2 ms. The remaining time is between two
    steps.
    """
    batches, exchanges = [], []
    for step in steps:
        fetch = START + ahead + 20 * MS * step
        begin = fetch + data * MS
        backward = begin + 3 * MS
        ready, end = backward + 6 * MS, START + ahead + 20 * MS * step + 15 * MS
        backward_end = end if kind == IN_BACKWARD else ready
        done = end + 2 * MS
        previous_end = 0 if step == steps[0] else fetch - 3 * MS
        batches.append((step, previous_end, fetch, begin, backward, backward_end, done, backward_end - backward))
        exchanges.append((step, ready - 2 * MS, ready, end, kind))
    return Window(rank, host, 1, len(steps), num_bytes, np.array(batches, BATCH), np.array(exchanges, EXCHANGE))


def test_a_window_survives_encoding() -> None:
    sent = window(rank=3)
    received = Window.load(sent.dump())
    assert (received.rank, received.host, received.number, received.num_steps, received.num_bytes) == (
        3,
        "a",
        1,
        4,
        400,
    )
    assert np.array_equal(received.batches, sent.batches)
    assert np.array_equal(received.exchanges, sent.exchanges)


@pytest.mark.parametrize("kind", [IN_BACKWARD, AFTER_BACKWARD])
def test_phases_exclude_the_time_of_waiting(kind: int) -> None:
    first, second = times_of([window(0, data=1, kind=kind), window(1, data=5, kind=kind)])
    assert first.num_bytes == 100
    assert (first.data_ms, first.forward_ms, first.backward_ms, first.optimizer_ms) == pytest.approx((1, 3, 6, 2))
    assert first.other_ms == pytest.approx(3)  # the time before the first step is unknown
    assert first.step_ms == pytest.approx(17 + first.other_ms)
    assert (first.communication_ms, first.hidden_ms, first.exposed_ms) == pytest.approx((7, 2, 5))
    assert (first.waiting_ms, first.transfer_ms) == pytest.approx((4, 1))
    assert (second.exposed_ms, second.waiting_ms, second.transfer_ms) == pytest.approx((1, 0, 1))


def test_the_slowest_rank_is_named_with_the_phase() -> None:
    times = times_of([window(0), window(1, data=5), window(2)])
    slowest = slowest_of(times)
    assert slowest is not None
    assert (slowest.rank, slowest.phase) == (1, "data")
    assert (slowest.lag_ms, slowest.phase_lag_ms) == pytest.approx((4, 4))
    values = logged_metrics(times)
    assert values["communication/slowest_rank"] == 1
    assert values["communication/exposed_ms"] == pytest.approx(11 / 3)
    assert all(isinstance(value, (int, float)) for value in values.values())
    assert slowest_of(times[:1]) is None


def test_clocks_of_hosts_are_aligned() -> None:
    windows = [window(0), window(1, data=5, host="b", ahead=700 * MS), window(2, host="a", ahead=0)]
    assert clock_offsets(windows) == {0: 0, 1: 700 * MS, 2: 0}
    assert [wait / MS for wait in waiting_times(windows)[0]] == pytest.approx([4] * 4)


def test_exchanges_that_one_rank_has_not_recorded_are_omitted() -> None:
    short = window(1, data=5)
    short = Window(1, "a", 1, 4, 400, short.batches, short.exchanges[1:])
    waiting = waiting_times([window(0), short])
    assert isnan(waiting[0][0])
    assert [wait / MS for wait in waiting[0][1:]] == pytest.approx([4] * 3)


def test_exchanges_of_models_count_in_the_steps_that_have_one() -> None:
    own = window(kind=MODEL_EXCHANGE)
    reduced = Window(0, "a", 1, 4, 400, own.batches, own.exchanges[:1])
    assert times_of([reduced])[0].exposed_ms == pytest.approx(5 / 4)


def test_the_first_steps_are_left_out_and_windows_are_weighed() -> None:
    own = window(steps=range(6))
    first = Window(0, "a", 0, 6, 600, own.batches, own.exchanges)
    times = [*times_of([first]), *times_of([window(data=3, steps=range(6, 12))])]
    assert [each.num_steps for each in times] == [4, 6]
    assert combined(times).data_ms == pytest.approx((4 * 1 + 6 * 3) / 10)
    assert combined(times).num_steps == 10


def test_a_window_without_steps_has_no_spans_and_a_step_time_of_zero() -> None:
    empty = Window(0, "a", 1, 0, 0, np.array([], BATCH), np.array([], EXCHANGE))
    assert times_of([empty])[0].step_ms == 0
    assert spans_of([empty]) == []


def test_a_trace_replaces_a_link_and_not_the_file_behind_it(tmp_path: Any) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "trace.json").symlink_to(tmp_path / "precious")
    write_trace([], tmp_path / "trace.json")
    assert (tmp_path / "precious").read_text() == "precious"
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "trace.json"]


def test_the_trace_has_the_last_steps_of_all_ranks(tmp_path: Any) -> None:
    windows = [window(0), window(1, data=5, host="b", ahead=700 * MS)]
    far = [window(rank, steps=range(2)) for rank in range(2)]
    both = [
        replace(own, batches=np.concatenate([before.batches, own.batches[2:]]))
        for before, own in zip(far, windows, strict=True)
    ]
    spans = spans_of(both)
    assert {span.step for span in spans} == {12, 13}
    assert min(span.begin_ms for span in spans) == 0
    write_trace(spans, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in drawn} == {0, 1}
    assert {event["name"] for event in drawn} == {
        *("data", "forward", "backward", "waits for the exchange", "optimizer", "gradients")
    }
    of_first = {event["name"]: event for event in drawn if (event["pid"], event["args"]["step"]) == (0, 13)}
    assert of_first["backward"]["dur"] == pytest.approx(6000)
    assert of_first["waits for the exchange"]["dur"] == pytest.approx(5000)
    assert of_first["gradients"]["args"] == {"step": 13, "waiting_ms": 4.0, "hidden_ms": 2.0}
    # An all-reduce ends at the same time on all ranks, independently of their clocks.
    ends = [each["ts"] + each["dur"] for each in drawn if (each["name"], each["args"]["step"]) == ("gradients", 13)]
    assert ends[0] == pytest.approx(ends[1])


# --- advice ---


def times(rank: int = 0, **changes: float) -> RankTimes:
    values = {
        "num_bytes": 4e6,
        "step_ms": 100,
        "data_ms": 1,
        "forward_ms": 30,
        "backward_ms": 60,
        "optimizer_ms": 5,
        "other_ms": 1,
        "communication_ms": 20,
        "hidden_ms": 17,
        "exposed_ms": 3,
        "waiting_ms": 1,
        "transfer_ms": 2,
    }
    return RankTimes(rank, 50, **{**values, **changes})


MUTUAL_WAITING = [times(0, waiting_ms=20, exposed_ms=22), times(1, waiting_ms=19, exposed_ms=21)]
LINK = {"transfer_ms": 40, "exposed_ms": 41, "communication_ms": 50, "hidden_ms": 9}
BY_LINK = [times(0, **LINK), times(1, **LINK)]


@pytest.mark.parametrize(
    ("ranks", "traits", "expected_text"),
    [
        ([times()], JobTraits(), "One process: nothing is exchanged, and computation is the bottleneck"),
        (
            [times(0), times(1)],
            JobTraits(),
            "Computation is the bottleneck: a step waits for communication for 3 % of its time",
        ),
        (
            [times(data_ms=40)],
            JobTraits(),
            "The step waits for data for 40 % of a step. Give the DataLoader more workers",
        ),
        ([times(0, data_ms=40), times(1, data_ms=41)], JobTraits(), "Every rank waits for data for 40 %"),
        (
            [times(0, waiting_ms=30), times(1, data_ms=31, waiting_ms=0)],
            JobTraits(),
            "Rank 1 is the bottleneck: other ranks wait 30 ms per step for it (30 % of the step). It is slower by 30 ms"
            " in data loading. Give rank 1's DataLoader more workers (`num_workers=...`)",
        ),
        ([times(0, waiting_ms=30), times(1, forward_ms=60, waiting_ms=0)], JobTraits(), "30 ms in the forward pass"),
        ([times(0, waiting_ms=30), times(1, other_ms=31, waiting_ms=0)], JobTraits(), "work between two steps"),
        (MUTUAL_WAITING, JobTraits(), "Ranks wait for each other in turns, for 20 % of a step"),
        (MUTUAL_WAITING, JobTraits(compressions=("bf16", "localsgd")), "`compression='localsgd'`."),
        (
            BY_LINK,
            JobTraits(("bf16", "powersgd"), num_hosts=2),
            "4 MB per step. Use `compression=...` to exchange less: 'bf16', 'po",
        ),
        (BY_LINK, JobTraits(("bf16", "powersgd"), num_buckets=3), "Exchange less often"),
        (
            BY_LINK,
            JobTraits(num_buckets=1),
            "so that the exchange begins while the backward pass still computes; 'auto' finds a size.",
        ),
        (
            BY_LINK,
            JobTraits(num_buckets=1, num_hosts=2, is_stock=True),
            "4 MB per step. `strategy='ddp_ext_bf16'`, or another `compression` of `ddp_ext`, exchanges less.",
        ),
        (
            [*BY_LINK, times(2, **LINK), times(3, **LINK)],
            JobTraits(num_hosts=2, is_stock=True),
            "On CPUs `strategy='ddp_ext'` sums on each host before it exchanges between hosts, and"
            " `strategy='ddp_ext_bf16'`",
        ),
        (BY_LINK, JobTraits(num_buckets=3), "Exchange less often (`Trainer(accumulate_grad_batches=...)`)"),
        (BY_LINK, JobTraits(is_stock=True), "Use `strategy='ddp_ext'`, which exchanges over shared memory"),
        (
            [times(0, **LINK, num_bytes=4e3), times(1, **LINK, num_bytes=4e3)],
            JobTraits(),
            "For so few bytes, the step waits for latency, not for",
        ),
        (
            [times(0, **LINK, num_bytes=4e3), times(1, **LINK, num_bytes=4e3)],
            JobTraits(is_compressed=True),
            "For so few bytes, the step waits for latency and compression, not for bandwidth",
        ),
    ],
)
def test_advice_names_the_bottleneck_and_an_argument(
    ranks: list[RankTimes], traits: JobTraits, expected_text: str
) -> None:
    advice = advise(ranks, traits)
    assert expected_text in advice
    assert "\n" not in advice

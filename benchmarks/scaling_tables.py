"""What :mod:`benchmarks.scaling` shows: predictions, beside measurements where there are any, and what to choose."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Curves, Spread, draw_curves, print_table
from benchmarks.scaling_costs import (
    BF16,
    EXCHANGES,
    LOCALSGD,
    POWERSGD,
    RING,
    TOPK,
    TREE,
    TWO_LEVELS,
    Compressions,
    Training,
)
from benchmarks.scaling_model import Link, contended, efficiency
from benchmarks.scaling_rank import APART, COMPUTE, PLAIN
from benchmarks.scaling_runs import Case

#: Network → by number of ranks, an exchange and its efficiency.
Choices = dict[str, list[tuple[str, float]]]
#: How far a prediction may be from what was measured, as a part of that.
LIMIT = 0.15
#: Numbers of ranks that are predicted, where they make whole hosts.
NUMBERS_OF_RANKS = tuple(2**power for power in range(1, 13))
#: Plots of a figure, from top to bottom: title, exchanges.
_PLOTS = (
    ("whole gradients", (RING, TREE, TWO_LEVELS)),
    ("less than that", (TWO_LEVELS, BF16, POWERSGD, TOPK, LOCALSGD)),
)


def held_against(case: Case, training: Training) -> list[dict[str, Any]]:
    """Predictions for what a case has measured.

    Whether exchanges go on beside the backward pass follows from :func:`overlap`; the other prediction is given too.

    Args:
        case: What was measured.
        training: What the predictions are made of.

    Returns:
        Per exchange, in seconds; ``error`` is a part of what was measured.
    """
    rows = []
    for exchange, times in case.steps.items():
        if exchange in (COMPUTE, APART):
            continue
        plain = TWO_LEVELS if case.has_two_levels else RING
        name = plain if exchange == PLAIN else exchange
        predicted = {overlaps: training.step_s(name, case.world_size, overlaps=overlaps) for overlaps in (False, True)}
        does_overlap, measured = overlap(case, exchange), median(times)
        counts = predicted[does_overlap]
        rows.append(
            {
                "case": case.label,
                "exchange": exchange,
                "computation_s": case.computation.seconds,
                "predicted_s": counts,
                "predicted_other_way_s": predicted[not does_overlap],
                "measured_s": asdict(Spread.of(times)),
                "error": counts / measured - 1,
                "predicted_efficiency": efficiency(training.alone_s, counts),
                "measured_efficiency": efficiency(training.alone_s, measured),
            }
        )
    return rows


def overlap(case: Case, exchange: str) -> bool:
    """Whether exchanges go on beside the backward pass where no rank has a core to spare.

    Those inside a host need the cores that compute, so they do not; nor do those of PowerSGD, which computes before,
    between and after its two messages. Else ranks of several hosts mostly wait for the cable.
    """
    return case.num_hosts > 1 and not case.has_two_levels and exchange != POWERSGD


def show_links(links: dict[str, tuple[Link, float]]) -> None:
    """Prints what messages take; each link with the largest misfit of the model."""
    print_table(
        "Links, from all-reduces of several sizes",
        ["between", "latency, us", "bandwidth, Gbit/s", "largest misfit of a size, %"],
        [
            [label, f"{link.latency_us:.1f}", f"{link.bandwidth_gbit:.2f}", f"{100 * misfit:.0f}"]
            for label, (link, misfit) in links.items()
        ],
    )


def show_computation(cases: Sequence[Case], alone_s: float, num_cores: int) -> None:
    """Prints what steps take without exchanges, beside what cores that are shared would make of one rank's."""
    print_table(
        f"ms per step without exchanges; all ranks share {num_cores} cores",
        ["case", "measured: median [quartiles]", "one rank's, times ranks per core"],
        [
            [
                case.label,
                Spread.of([1e3 * one for one in case.steps[COMPUTE]]).text(1),
                f"{1e3 * contended(alone_s, case.world_size, num_cores):.1f}",
            ]
            for case in cases
        ],
    )


def show_held(rows: Sequence[dict[str, Any]]) -> None:
    """Prints predictions beside measurements, and says which miss."""
    table = []
    for row in rows:
        spread = Spread(**{name: 1e3 * value for name, value in row["measured_s"].items() if name != "count"}, count=0)
        table.append(
            [
                row["case"],
                row["exchange"],
                *(f"{1e3 * row[name]:.1f}" for name in ("computation_s", "predicted_other_way_s", "predicted_s")),
                spread.text(1),
                f"{100 * row['error']:+.1f}",
                "held" if abs(row["error"]) <= LIMIT else "missed",
                f"{row['predicted_efficiency']:.2f} / {row['measured_efficiency']:.2f}",
            ]
        )
    columns = ["case", "exchange", "computation", "other way", "predicted", "measured [quartiles]", "error, %"]
    print_table(
        "ms per step, predicted and measured",
        [*columns, f"{100 * LIMIT:.0f} %", "efficiency"],
        table,
        caption="Other way: with exchanges beside the backward pass where they are not, and the reverse. Efficiency:"
        " predicted / measured.",
    )


def ranks_of(training: Training) -> list[int]:
    """Those of :data:`NUMBERS_OF_RANKS` that make whole hosts."""
    on_each = training.ranks_per_host
    return [number for number in NUMBERS_OF_RANKS if number <= on_each or number % on_each == 0]


def predictions(training: Training) -> list[dict[str, Any]]:
    """For all exchanges and numbers of ranks: seconds per step and efficiency, overlapped and not."""
    return [
        {
            "num_ranks": number,
            "exchange": name,
            "overlaps": overlaps,
            "step_s": training.step_s(name, number, overlaps=overlaps),
            "efficiency": training.efficiency(name, number, overlaps=overlaps),
        }
        for number in ranks_of(training)
        for name in EXCHANGES
        for overlaps in (True, False)
    ]


def show_predictions(label: str, training: Training) -> None:
    """Prints them."""
    for overlaps, words in ((True, "beside the backward pass"), (False, "after it")):
        print_table(
            f"{label}: ms per step and efficiency by ranks, if gradients are exchanged {words}",
            ["ranks", *EXCHANGES],
            [
                [
                    str(number),
                    *(
                        f"{1e3 * training.step_s(name, number, overlaps=overlaps):.0f}"
                        f" {training.efficiency(name, number, overlaps=overlaps):.2f}"
                        for name in EXCHANGES
                    ),
                ]
                for number in ranks_of(training)
            ],
        )


def choices(trainings: dict[str, Training], numbers: Sequence[int], enough: float) -> Choices:
    """What to choose, by network and by number of ranks."""
    return {label: [training.choice(number, enough) for number in numbers] for label, training in trainings.items()}


def show_choices(chosen: Choices, numbers: Sequence[int], enough: float) -> None:
    """Prints them."""
    print_table(
        f"What changes the training least and is {100 * enough:.0f} % efficient, else what is fastest; its efficiency",
        ["network", *(f"{number} ranks" for number in numbers)],
        [[label, *(f"{name} {reached:.2f}" for name, reached in row)] for label, row in chosen.items()],
    )


def draw(directory: Path, name: str, title: str, columns: Sequence[tuple[str, Training, bool]]) -> Path:
    """Draws efficiency over ranks; each column is a training with its label, and whether exchanges overlap."""
    rows = []
    for words, exchanges in _PLOTS:
        row = []
        for label, training, overlaps in columns:
            numbers = ranks_of(training)
            series = {
                exchange: [Spread.of([training.efficiency(exchange, n, overlaps=overlaps)]) for n in numbers]
                for exchange in exchanges
            }
            row.append(Curves(f"{label}: {words}", "ranks", "efficiency", numbers, series))
        rows.append(row)
    return draw_curves(directory, name, title, rows)


def described(training: Training) -> dict[str, Any]:
    """A training's numbers, for the JSON."""
    given: Compressions = training.compressions
    return {
        "alone_s": training.alone_s,
        "computation": asdict(training.computation),
        "num_bytes": training.num_bytes,
        "ranks_per_host": training.ranks_per_host,
        "inside": asdict(training.inside),
        "between": asdict(training.between),
        "compressions": {**asdict(given), "seconds": dict(given.seconds)},
    }

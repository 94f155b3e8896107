"""Tables of :mod:`benchmarks.scaling`: predictions, measurements, and recommendations."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.report import Spread, print_table
from benchmarks.scaling_costs import (
    EXCHANGES,
    POWERSGD,
    RING,
    TWO_LEVELS,
    Compressions,
    Training,
)
from benchmarks.scaling_model import Link, contended, efficiency
from benchmarks.scaling_rank import APART, COMPUTE, PLAIN
from benchmarks.scaling_runs import Case

#: Network → number of ranks → exchange and its efficiency.
Choices = dict[str, list[tuple[str, float]]]
#: Largest accepted error of a prediction, relative to the measurement.
LIMIT = 0.15
#: Numbers of ranks for predictions, if they fill whole hosts.
NUMBERS_OF_RANKS = tuple(2**power for power in range(1, 13))


def held_against(case: Case, training: Training) -> list[dict[str, Any]]:
    """Returns predictions for the measurements of a case.

    :func:`overlap` determines whether exchanges overlap with the backward pass; the other prediction is also returned.

    Args:
        case: Measurements.
        training: Training for the predictions.

    Returns:
        Predictions per exchange, in seconds; ``error`` is relative to the measurement.
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
    """Returns whether exchanges overlap with the backward pass if no rank has an idle core.

    Exchanges inside a host use the cores that compute, so they do not overlap. PowerSGD computes before, between, and
    after its two messages, and does not overlap either. In other exchanges, ranks of several hosts mostly wait for the
    network.
    """
    return case.num_hosts > 1 and not case.has_two_levels and exchange != POWERSGD


def show_links(links: dict[str, tuple[Link, float]]) -> None:
    """Prints latency and bandwidth of each link, with the largest error of the model."""
    print_table(
        "Links, from all-reduces of several sizes",
        ["between", "latency, us", "bandwidth, Gbit/s", "largest error of a size, %"],
        [
            [label, f"{link.latency_us:.1f}", f"{link.bandwidth_gbit:.2f}", f"{100 * fit_error:.0f}"]
            for label, (link, fit_error) in links.items()
        ],
    )


def show_computation(cases: Sequence[Case], alone_s: float, num_cores: int) -> None:
    """Prints the times of steps without exchanges, and estimates from one rank for shared cores."""
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
    """Prints predictions and measurements, and marks predictions with too large errors."""
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
        caption="Other way: with overlap if the prediction has none, and without overlap otherwise. Efficiency:"
        " predicted / measured.",
    )


def ranks_of(training: Training) -> list[int]:
    """Returns the numbers of :data:`NUMBERS_OF_RANKS` that fill whole hosts."""
    on_each = training.ranks_per_host
    return [number for number in NUMBERS_OF_RANKS if number <= on_each or number % on_each == 0]


def predictions(training: Training) -> list[dict[str, Any]]:
    """Returns seconds per step and efficiency for all exchanges and numbers of ranks, with and without overlap."""
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
    """Prints the predictions for one network."""
    for overlaps, overlap_text in ((True, "during the backward pass"), (False, "after it")):
        print_table(
            f"{label}: ms per step and efficiency by ranks, if gradients are exchanged {overlap_text}",
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
    """Returns the recommended exchanges by network and by number of ranks."""
    return {label: [training.choice(number, enough) for number in numbers] for label, training in trainings.items()}


def show_choices(chosen: Choices, numbers: Sequence[int], enough: float) -> None:
    """Prints the recommended exchanges."""
    print_table(
        f"Exchange with the smallest effect that is {100 * enough:.0f} % efficient, else the fastest; efficiency",
        ["network", *(f"{number} ranks" for number in numbers)],
        [[label, *(f"{name} {reached:.2f}" for name, reached in row)] for label, row in chosen.items()],
    )


def described(training: Training) -> dict[str, Any]:
    """Returns the figures of a training, for the JSON file."""
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

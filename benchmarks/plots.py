"""Draws the plots of the JSON files that benchmarks write.

Every benchmark draws its plot with :func:`draw_plot` from the file that it has written, so a change to the drawing
needs no measurement. Without arguments, the program redraws all plots of ``benchmarks/results``::

    python -m benchmarks.plots
    python -m benchmarks.plots benchmarks/results/step_time.json
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.drawing import Curves, Panel, draw, draw_curves
from benchmarks.report import DEFAULT_OUTPUT, Spread

Payload = dict[str, Any]


def draw_plot(file: Path, kind: str | None = None) -> Path | None:
    """Draws the plot of a JSON file next to it.

    Args:
        file: The JSON file.
        kind: Key of the plot in :data:`_PLOTS`; if None, the name of the file determines it.

    Returns:
        The picture, or None if the benchmark has no plot.
    """
    name = kind or file.stem
    function = next((found for key, found in _PLOTS.items() if f"{name}_".startswith(f"{key}_")), None)
    return None if function is None else function(json.loads(file.read_text()), file.parent, file.stem)


def _columns(rows: list[Payload], kind: str) -> dict[str, list[Spread]]:
    """Returns name → one spread per row."""
    return {name: [Spread(**row[kind][name]) for row in rows] for name in rows[0][kind]}


def _times_and_ratios(
    rows: list[Payload], kind: str, title: str, *, label: str = "case", is_logarithmic: bool = False
) -> list[Panel]:
    """Returns a panel of times on a logarithmic axis, and a panel of their ratios.

    Args:
        rows: Rows of a benchmark.
        kind: Key of the times in each row.
        title: Title of the panel of times.
        label: Key of the label in each row.
        is_logarithmic: Whether the axis of the ratios is logarithmic.
    """
    labels = [row[label] for row in rows]
    return [
        Panel(title, labels, _columns(rows, kind), is_logarithmic=True),
        Panel("ratio of times", labels, _columns(rows, "ratios"), 1, "equal", is_logarithmic=is_logarithmic),
    ]


def _step_time(payload: Payload, directory: Path, name: str) -> Path:
    panels = _times_and_ratios(payload["results"], "ms_per_step", "ms per step")
    return draw(directory, name, f"Training step, {payload['settings'].get('ranks', '2 CPU ranks')}", panels)


def _collectives(payload: Payload, directory: Path, name: str) -> Path:
    panels = _times_and_ratios(
        payload["results"], "us_per_call", "microseconds per call", label="operation", is_logarithmic=True
    )
    return draw(directory, name, "Collectives, 2 CPU ranks", panels)


def _message_sizes(payload: Payload, directory: Path, name: str) -> Path:
    by_ranks: dict[int, list[Payload]] = {}
    for row in payload["results"]:
        by_ranks.setdefault(row["num_ranks"], []).append(row)
    plots = [
        Curves(f"{num_ranks} ranks", "bytes", label, [row["num_bytes"] for row in rows], _columns(rows, kind))
        for kind, label in {"us_per_call": "microseconds per call", "bus_gb_per_s": "bus bandwidth, GB/s"}.items()
        for num_ranks, rows in by_ranks.items()
    ]
    return draw_curves(directory, name, "All-reduce by message size, CPU ranks of one host", plots)


def _dp(payload: Payload, directory: Path, name: str) -> Path:
    panels = []
    for arena in dict.fromkeys(row["arena"] for row in payload["results"]):
        rows = [row for row in payload["results"] if row["arena"] == arena]
        labels = [row["case"] for row in rows]
        ratios = {ratio.partition("/")[0]: spreads for ratio, spreads in _columns(rows, "ratios").items()}
        panels += [
            Panel(f"{arena}: ms per step", labels, _columns(rows, "ms_per_step"), is_logarithmic=True),
            Panel(f"{arena}: time over the single device's", labels, ratios, line_at=1, line_label="single device"),
        ]
    return draw(directory, name, "dp_ext: a training step with replicas in one process", panels)


def _horovod(payload: Payload, directory: Path, name: str) -> Path:
    panels = _times_and_ratios(payload["results"], "ms_per_step", "ms per step")
    return draw(directory, name, "Training step on Horovod, 2 CPU ranks", panels)


def _spawn(payload: Payload, directory: Path, name: str) -> Path:
    times = [row for row in payload["results"] if "seconds" in row]
    memory = [row for row in payload["results"] if "extra_over_result" in row]
    panels = _times_and_ratios(times, "seconds", "seconds", is_logarithmic=True)
    if memory:
        goal = memory[0]["goal"]["largest_extra_over_result"]
        label, spreads = "peak extra memory over size of result", _columns(memory, "extra_over_result")
        panels.append(Panel(label, [row["case"] for row in memory], spreads, line_at=goal, line_label="goal"))
    title = "Workers on Ray, 2 CPU ranks" if name == "spawn_ray" else "Spawned workers, 2 CPU ranks"
    return draw(directory, name, title, panels)


def _lost_rank(payload: Payload, directory: Path, name: str) -> Path:
    # Plain torch has no figures after the kill.
    found = {contender: figures for contender, figures in payload["results"].items() if "next_s" in figures}
    labels = list(found)
    times, steps = (
        {label: [Spread(**figures[figure]) for figures in found.values()] for figure, label in kinds.items()}
        for kinds in ({"next_s": "to the next step", "back_s": "to where it was"}, {"over_plain": "a step"})
    )
    panels = [
        Panel("seconds from the kill", labels, times, is_logarithmic=True, are_rows_contenders=True),
        Panel("step at the default interval, over plain torch", labels, steps, line_at=1, are_rows_contenders=True),
    ]
    millions = name.removeprefix("lost_rank_").removesuffix("m")
    return draw(directory, name, f"One of two ranks is killed, {millions} M parameters", panels)


def _hosts(payload: Payload, directory: Path, name: str) -> Path:
    panels = [
        Panel(
            f"{label}: ms per step",
            list(measured),
            {"": [Spread.of([one["step_ms"] for one in seen]) for seen in measured.values()]},
            is_logarithmic=True,
            are_rows_contenders=True,
        )
        for label, measured in payload["results"].items()
    ]
    cpu = payload["environment"]["cpu"]
    return draw(directory, name, f"Milliseconds per training step over a slow network ({cpu})", panels)


def _scaling(payload: Payload, directory: Path, name: str) -> Path:
    label, cpu = next(iter(payload["choices"])), payload["environment"]["cpu"]
    kinds = {"overlapped": (payload["predictions"], True), "not overlapped": (payload["predictions"], False)}
    return _efficiency(kinds, directory, name, f"Predicted efficiency, {label}, {cpu}")


def _scaling_cluster(payload: Payload, directory: Path, name: str) -> Path:
    kinds = {label: (result["predictions"], True) for label, result in payload["results"].items()}
    given = next(iter(payload["results"].values()))["given"]
    about = f"{given['num_bytes'] / 4e6:g} M parameters, {given['alone_s'] * 1e3:g} ms of computation"
    return _efficiency(kinds, directory, name, f"Predicted efficiency, {about}")


#: Plots per kind of prediction: title, exchanges.
_EXCHANGES = {
    "whole gradients": ("plain, ring", "plain, tree", "plain, two levels"),
    "fewer bytes": ("plain, two levels", "bf16", "powersgd", "topk", "localsgd"),
}


def _efficiency(kinds: dict[str, tuple[list[Payload], bool]], directory: Path, name: str, title: str) -> Path:
    """Draws efficiency over ranks for each kind: its predictions, and whether exchanges overlap."""
    plots = []
    for exchange_label, exchanges in _EXCHANGES.items():
        for label, (predictions, overlaps) in kinds.items():
            found = {
                exchange: {
                    one["num_ranks"]: Spread.of([one["efficiency"]])
                    for one in predictions
                    if one["exchange"] == exchange and one["overlaps"] == overlaps
                }
                for exchange in exchanges
            }
            numbers = list(found[exchanges[0]])
            series = {exchange: list(by_ranks.values()) for exchange, by_ranks in found.items()}
            plots.append(Curves(f"{label}: {exchange_label}", "ranks", "efficiency", numbers, series))
    return draw_curves(directory, name, title, plots)


def _monitor(payload: Payload, directory: Path, name: str) -> Path:
    rows = payload["results"]
    labels = [row["case"] for row in rows]
    budget = float(payload["goals"][0]["wanted"].rpartition(" ")[2])
    panels = [
        Panel("ms per step", labels, _columns(rows, "ms_per_step"), is_logarithmic=True),
        Panel("ratio of times", labels, _columns(rows, "ratios"), budget, f"{budget - 1:.0%} more"),
    ]
    return draw(directory, name, "Training step with and without a CommunicationMonitor, 2 CPU ranks", panels)


def _discovery(payload: Payload, directory: Path, name: str) -> Path:
    from benchmarks.discovery import PARTS  # which imports this module

    rows = payload["results"]
    spreads = {"median, quartiles": [Spread(**row["ms"]) for row in rows]}
    panel = Panel("ms", [PARTS[row["part"]] for row in rows], spreads, rows[0]["budget_ms"], "budget of the hook")
    return draw(directory, name, "Cost of the installation", [panel])


#: Beginning of the name of a JSON file → function that draws its plot, or None; the first that fits counts.
_PLOTS: dict[str, Callable[[Payload, Path, str], Path] | None] = {
    "step_time": _step_time,
    "collectives": _collectives,
    "message_sizes": _message_sizes,
    "dp": _dp,
    "horovod_elastic": None,
    "horovod": _horovod,
    "spawn_elastic": None,
    "spawn": _spawn,
    "lost_rank": _lost_rank,
    "hosts": _hosts,
    "scaling_cluster": _scaling_cluster,
    "scaling": _scaling,
    "monitor": _monitor,
    "discovery": _discovery,
}


def main() -> None:
    """Draws plots again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="JSON files; by default, all of benchmarks/results")
    for file in parser.parse_args().files or sorted(DEFAULT_OUTPUT.glob("*.json")):
        picture = draw_plot(file)
        print(picture or f"{file} has no plot")


if __name__ == "__main__":
    main()

"""Plots of benchmarks: dots with quartiles, and curves.

Plots are legible on a phone: one column, with large letters. A contender has the same color in all plots, and as a part
of a ratio: the left half of a marker shows the numerator, the right half the denominator. A hollow marker shows the
same contender over gloo, or another variant of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.report import Spread

#: Width of a plot in inches, and its resolution.
WIDTH, DPI = 5.4, 150
#: Inches of a row, and of each series in it.
ROW, SERIES = 0.15, 0.055
#: Inches around the axes of a panel, without its legend, and inches of a row of a legend.
AROUND, LEGEND_ROW = 0.65, 0.2
_LEGEND = {"fontsize": 8.5, "frameon": False, "borderaxespad": 0.2, "handletextpad": 0.4, "columnspacing": 1.2}


@dataclass(frozen=True)
class Style:
    """Color and marker of a contender.

    Attributes:
        color: Color, the same for all variants of a strategy.
        marker: Marker of matplotlib.
        is_hollow: Whether the marker has no fill.
    """

    color: str
    marker: str = "o"
    is_hollow: bool = False

    @property
    def fill(self) -> str:
        """Color of the inside of a marker."""
        return "white" if self.is_hollow else self.color


_DDP, _DDP_EXT, _DP_EXT, _HOROVOD_EXT = "#1f77b4", "#ef7d0a", "#2a9d38", "#8a5fc0"
_TORCH, _RAW_HOROVOD = "#777777", "#8c564b"
#: Contender → its style. A strategy and its variants share a color.
STYLES = {
    "ddp": Style(_DDP),
    "ddp, checkpoints on disk": Style(_DDP),
    "ddp_spawn": Style("#17a9c4"),
    "ddp_ext": Style(_DDP_EXT),
    "ddp_ext, gloo": Style(_DDP_EXT, is_hollow=True),
    "ddp_ext over gloo": Style(_DDP_EXT, is_hollow=True),
    "ddp_ext, buckets by trial": Style(_DDP_EXT, "s"),
    "ddp_spawn_ext": Style("#d62728"),
    "ddp_spawn_elastic_ext": Style("#7d1128"),
    "ddp_elastic_ext": Style("#d81b7a"),
    "ddp_ray_ext": Style("#e08ab8"),
    "TorchTrainer": Style("#9a9b1c"),
    "dp_ext": Style(_DP_EXT),
    "dp_ext 1": Style(_DP_EXT, is_hollow=True),
    "dp_ext 2 in turn": Style(_DP_EXT, "s"),
    "dp_ext 2 at once": Style(_DP_EXT),
    "single device": Style(_TORCH),
    "horovod_ext": Style(_HOROVOD_EXT),
    "raw Horovod": Style(_RAW_HOROVOD),
    "raw, our settings": Style(_RAW_HOROVOD, is_hollow=True),
    "raw torch": Style(_TORCH, is_hollow=True),
    "raw torch, shm": Style(_TORCH),
    "raw torch, one rank": Style(_TORCH, "s"),
    "plain torch DDP": Style(_TORCH),
    "torch's DDP": Style(_TORCH),
    "torch's DDP, bf16 hook": Style(_TORCH, is_hollow=True),
    "torchft": Style("#3b3b3b"),
    "no exchange": Style("#00695c"),
    "empty callback": Style(_TORCH),
    "monitor": Style("#129a8f"),
    # Transports, in the colors of the strategies that use them by default.
    "gloo": Style(_DDP),
    "shm": Style(_DDP_EXT),
    "Horovod, MPI": Style(_HOROVOD_EXT),
    "copy": Style(_TORCH),
    # Exchanges of ddp_ext.
    "plain, ring": Style("#a6761d"),
    "plain, tree": Style(_TORCH),
    "plain, two levels": Style(_DDP_EXT),
    "bf16": Style("#e7298a"),
    "powersgd": Style("#1b9e77"),
    "topk": Style("#6a67ab"),
    "localsgd": Style("#5f9a1b"),
    "diloco": Style("#3866a8"),
    "diloco, momentum 0.9": Style("#3866a8", is_hollow=True),
}
#: Styles of other names, in the order of their appearance.
_FURTHER = tuple(Style(color, marker) for marker in "D^v" for color in ("#444444", "#999999"))


def style_of(name: str, index: int = 0) -> Style:
    """Returns the style of a contender; another name gets one by its index."""
    return STYLES.get(name, _FURTHER[index % len(_FURTHER)])


@dataclass
class Panel:
    """One plot of a figure: for every label, a point with its spread from each series.

    Attributes:
        axis: Label of the axis, with the unit.
        labels: Labels of the rows, from top to bottom.
        series: Name → one spread per label. ``A/B`` is the ratio of contender A to contender B.
        line_at: Position of a line that shows equality or a budget; None for no line.
        line_label: Label of the line.
        is_logarithmic: Whether the axis is logarithmic.
        are_rows_contenders: Whether the labels, not the series, are names of contenders, and determine the colors.
    """

    axis: str
    labels: Sequence[str]
    series: dict[str, Sequence[Spread]]
    line_at: float | None = None
    line_label: str = ""
    is_logarithmic: bool = False
    are_rows_contenders: bool = False

    @property
    def has_legend(self) -> bool:
        """Whether the panel has more than one kind of points, or a line with a label."""
        return len(self.series) > 1 or bool(self.line_label)

    @property
    def height(self) -> float:
        """Height of the axes in inches."""
        num_lines = max(label.count("\n") for label in self.row_labels) + 1
        return len(self.labels) * max(ROW + SERIES * len(self.series), 0.19 * num_lines) + 0.1

    @property
    def row_labels(self) -> list[str]:
        """Labels of the rows, the long ones in several lines."""
        return [fill(label, 24) for label in self.labels]

    @property
    def legend_height(self) -> float:
        """Height of the legend in inches."""
        entries = len(self.series) + bool(self.line_label)
        return -(-entries // 2) * LEGEND_ROW if self.has_legend else 0.0


def draw(directory: Path, name: str, title: str, panels: Sequence[Panel]) -> Path:
    """Draws the panels, one below the other, into ``<directory>/<name>.png``: medians, and lines between quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 0.4 + sum(panel.height + panel.legend_height + AROUND for panel in panels)
    figure, all_axes = pyplot.subplots(
        len(panels),
        1,
        figsize=(WIDTH, height),
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": [panel.height for panel in panels]},
    )
    for axes, panel in zip(all_axes[:, 0], panels, strict=True):
        draw_panel(axes, panel)
    return _save(figure, directory, name, title)


@dataclass
class Curves:
    """One plot of a figure of curves, both axes logarithmic: medians, and bands from quartile to quartile.

    Attributes:
        title: Title of the plot.
        x_axis: Label of the x axis, with the unit.
        y_axis: Label of the y axis, with the unit.
        x: Positions of the points.
        series: Name → one spread per point.
    """

    title: str
    x_axis: str
    y_axis: str
    x: Sequence[float]
    series: dict[str, Sequence[Spread]]


def draw_curves(directory: Path, name: str, title: str, plots: Sequence[Curves]) -> Path:
    """Draws the plots, one below the other, into ``<directory>/<name>.png``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        len(plots), 1, figsize=(WIDTH, 2.75 * len(plots) + 0.4), squeeze=False, layout="constrained"
    )
    for axes, curves in zip(all_axes[:, 0], plots, strict=True):
        for index, (label, spreads) in enumerate(curves.series.items()):
            style = style_of(label, index)
            medians = [spread.median for spread in spreads]
            axes.plot(curves.x, medians, "-", marker=style.marker, color=style.color, markersize=3.5, label=label)
            quartiles = [[getattr(one, end) for one in spreads] for end in ("lower_quartile", "upper_quartile")]
            axes.fill_between(curves.x, *quartiles, color=style.color, alpha=0.2, linewidth=0)
        axes.set(xscale="log", yscale="log", xlabel=curves.x_axis, ylabel=curves.y_axis)
        axes.set_title(curves.title, fontsize=10, loc="left")
        _label_decades(axes.yaxis, *axes.get_ylim())
        axes.grid(alpha=0.3)
        axes.legend(**_LEGEND)
    return _save(figure, directory, name, title)


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draws one panel on matplotlib axes."""
    step = 0.7 / len(panel.series)
    for index, (name, spreads) in enumerate(panel.series.items()):
        rows = [row + (index - (len(panel.series) - 1) / 2) * step for row in range(len(panel.labels))]
        if panel.are_rows_contenders:
            styles = [style_of(label, row) for row, label in enumerate(panel.labels)]
            for row, spread, style in zip(rows, spreads, styles, strict=True):
                _draw_points(axes, [spread], [row], Style(style.color, "oD^s"[index], style.is_hollow))
            if len(panel.series) > 1:
                axes.plot([], [], color="black", linestyle="", marker="oD^s"[index], markersize=5, label=name)
        else:
            above, _, below = name.partition("/")
            other = style_of(below, index) if below else None
            _draw_points(axes, spreads, rows, style_of(above, index), other, label=name.replace("/", " / "))
    if panel.line_at is not None:
        axes.axvline(panel.line_at, color="black", linestyle="--", linewidth=1, label=panel.line_label or None)
    if panel.is_logarithmic:
        axes.set_xscale("log")
        _label_decades(axes.xaxis, *axes.get_xlim())
    else:
        medians = [spread.median for spreads in panel.series.values() for spread in spreads]
        if max(medians) > 1.5 * min(medians):  # otherwise, all points would be at the right edge
            axes.set_xlim(left=0)
    axes.set_yticks(range(len(panel.labels)), panel.row_labels)
    axes.set_ylim(len(panel.labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    for between in range(1, len(panel.labels)):
        axes.axhline(between - 0.5, color="black", alpha=0.12, linewidth=0.6)
    axes.set_xlabel(panel.axis)
    axes.grid(axis="x", alpha=0.3)
    if panel.has_legend:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, **_LEGEND)


def _draw_points(
    axes: Any,
    spreads: Sequence[Spread],
    rows: Sequence[float],
    style: Style,
    other: Style | None = None,
    label: str | None = None,
) -> None:
    """Draws the points of a series; ``other`` is the style of the denominator of a ratio."""
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.lower_quartile for spread in spreads]
    above = [spread.upper_quartile - spread.median for spread in spreads]
    halves = {"markerfacecolor": style.fill}
    if other is not None:
        halves.update(fillstyle="left", markerfacecoloralt=other.fill)
    edge = other or style
    axes.errorbar(
        *(medians, rows),
        xerr=[below, above],
        linestyle="",
        marker=edge.marker,
        markersize=5,
        markeredgecolor=edge.color,
        color=style.color,
        ecolor=style.color,
        elinewidth=1.2,
        label=label,
        **halves,
    )


def _label_decades(axis: Any, lowest: float, highest: float) -> None:
    """Labels a logarithmic axis with plain numbers, with more of them on a short axis."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    decades = log10(highest / lowest)
    if decades > 5:
        return
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.2 else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _save(figure: Any, directory: Path, name: str, title: str) -> Path:
    from matplotlib import pyplot

    figure.suptitle(fill(title, 52), fontsize=11)
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{name}.png"
    figure.savefig(file, dpi=DPI)
    pyplot.close(figure)
    return file

"""Timeline of all ranks as an image; imports matplotlib only when it draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_strategies_ext.monitoring.trace import EXCHANGE, TRAINING, Span, replacing

_COLORS = {
    "data": "tab:olive",
    "forward": "tab:blue",
    "backward": "tab:cyan",
    "waits for the exchange": "tab:red",
    "optimizer": "tab:purple",
    "gradients": "tab:orange",
    "models": "tab:brown",
}
#: Maximum number of ranks in a legible image; the trace contains all ranks.
_MAX_RANKS = 32
#: Minimum width of a span relative to the image, so that each span has at least a pixel.
_MIN_WIDTH = 1 / 2000


def plot_timeline(spans: Sequence[Span], path: Path) -> None:
    """Draws two rows over time for each of the first :data:`_MAX_RANKS` ranks.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = sorted({span.rank for span in spans})[:_MAX_RANKS]
    figure = Figure(figsize=(12, 1.6 + 0.7 * len(ranks)), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, whose backend the user may have chosen
    axes: Any = figure.subplots()
    end_ms = max((span.begin_ms + span.duration_ms for span in spans), default=1.0)
    for position, rank in enumerate(ranks):
        for row, top in ((TRAINING, position - 0.4), (EXCHANGE, position + 0.1)):
            own = [span for span in spans if span.rank == rank and span.row == row]
            axes.broken_barh(
                [(span.begin_ms, max(span.duration_ms, end_ms * _MIN_WIDTH)) for span in own],
                (top, 0.48 if row == TRAINING else 0.3),
                facecolors=[_COLORS[span.name] for span in own],
            )
    axes.set(xlim=(0, end_ms), ylim=(len(ranks) - 0.4, -0.6), xlabel="ms")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    used = {span.name for span in spans}
    handles = [Patch(color=color, label=name) for name, color in _COLORS.items() if name in used]
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(handles) or 1, frameon=False)
    with replacing(path) as file:
        figure.savefig(file, dpi=120, format=path.suffix.removeprefix("."))

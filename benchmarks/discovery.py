"""Milliseconds that an installation of this package adds to ``import torch`` and to ``import lightning``.

    python -m benchmarks.discovery
    python -m benchmarks.discovery --interpreters 50

``import torch`` takes seconds and varies by more than these few milliseconds, so it is not timed with and without the
package. Instead, a new interpreter imports torch with the hook disabled (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), and then
times the same actions that torch would have taken:

* the search for entry points, which is independent of the installed packages, for comparison;
* loading and calling the entry point of this package, which has a budget.

In further interpreters, the program measures the time in which Lightning's two registries are filled while Lightning is
imported, and the time in which the import hook of this package checks the names of modules that Lightning imports.
"""

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.plots import draw_plot
from benchmarks.report import Spread, parse, print_table, write_json

BUDGET_MS = 5.0

#: Key of a part → its name in the table. All times are in ms.
PARTS = {
    "hook": "import torch: load and call the hook of this package",
    "search": "import torch: search for entry points",
    "registries": "import lightning: fill both registries",
    "lookups": "import lightning: look at module names",
}

PROBE_TORCH = """
import json, time
import torch
started_at = time.perf_counter()
from importlib.metadata import entry_points
found = [point for point in entry_points(group="torch.backends") if point.name == "lightning_strategies_ext"]
searched_at = time.perf_counter()
found[0].load()()
ended_at = time.perf_counter()
print(json.dumps({"search": (searched_at - started_at) * 1e3, "hook": (ended_at - searched_at) * 1e3}))
"""

# The functions are replaced by timed functions before this package imports them.
PROBE_LIGHTNING = """
import json, sys, time
import torch, wrapt
seconds = {"registries": 0.0, "lookups": 0.0}
register = wrapt.register_post_import_hook

def timed(part, function):
    def call(*args, **kwargs):
        started_at = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - started_at
    return call

wrapt.register_post_import_hook = lambda hook, name: register(timed("registries", hook), name)
import lightning_strategies_ext

class TimedFinder:
    def __init__(self, finder):
        self.find_spec = timed("lookups", finder.find_spec)

sys.meta_path[:] = [TimedFinder(one) if type(one).__module__ == "wrapt.importer" else one for one in sys.meta_path]
import lightning
from lightning.pytorch.strategies import StrategyRegistry
assert "ddp_ext" in StrategyRegistry
print(json.dumps({part: value * 1e3 for part, value in seconds.items()}))
"""


def run_probe(source: str) -> dict[str, float]:
    """Runs a program in a new interpreter and returns the ms per part that it prints.

    Raises:
        subprocess.CalledProcessError: If the program fails. Its standard error is not captured.
    """
    completed = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    ms: dict[str, float] = json.loads(completed.stdout.splitlines()[-1])
    return ms


def measure(interpreters: int) -> dict[str, list[float]]:
    """Runs both probes, each in the given number of new interpreters.

    Returns:
        Part → ms, one value per interpreter.
    """
    samples: dict[str, list[float]] = {part: [] for part in PARTS}
    for index in range(interpreters + 1):
        ms = {**run_probe(PROBE_TORCH), **run_probe(PROBE_LIGHTNING)}
        # The first interpreter reads files that are not in the page cache, and may compile them.
        if index > 0:
            for part, value in ms.items():
                samples[part].append(value)
    return samples


def summarize(samples: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Summarizes each part."""
    return [
        {
            "part": part,
            "budget_ms": BUDGET_MS if part == "hook" else None,
            "ms": vars(Spread.of(values)),
            "interpreters_ms": [round(value, 4) for value in values],
        }
        for part, values in samples.items()
    ]


def present(summaries: list[dict[str, Any]]) -> None:
    """Prints the table."""
    spreads = {summary["part"]: Spread(**summary["ms"]) for summary in summaries}
    rows = [
        [PARTS[part], spread.text(), f"{spread.maximum:.2f}", f"{BUDGET_MS:.0f}" if part == "hook" else ""]
        for part, spread in spreads.items()
    ]
    hook = spreads["hook"].median
    print_table(
        "ms, one fresh interpreter per sample: median [quartiles]",
        ["part", "ms", "largest", "budget"],
        rows,
        caption=f"The hook takes {hook:.2f} ms, {'within' if hook <= BUDGET_MS else 'OVER'} the budget of"
        f" {BUDGET_MS:.0f} ms. torch searches for entry points whether or not this package is installed.",
    )


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpreters", type=int, default=15, help="fresh interpreters per probe")
    arguments = parse(parser, "three interpreters", interpreters=3)
    if arguments.interpreters < 1:
        parser.error("--interpreters must be positive")
    return arguments


def main() -> None:
    """Measures, prints the tables, writes the JSON file, and draws the plot."""
    arguments = parse_arguments()
    summaries = summarize(measure(arguments.interpreters))
    present(summaries)
    settings = {"interpreters": arguments.interpreters}
    draw_plot(write_json(arguments.output, "discovery", {"settings": settings, "results": summaries}))


if __name__ == "__main__":
    main()

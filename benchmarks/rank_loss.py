"""Costs of losing a rank, and of preparing for it: elastic strategies, stock with checkpoint files, torchft.

    python -m benchmarks.rank_loss
    python -m benchmarks.rank_loss --parameters 1 --rounds 11
    python -m benchmarks.rank_loss --against HEAD~1    # two revisions in turns: see benchmarks/against.py

Two CPU ranks on this host, one thread each, train linear layers of width 1000 with Adam, 32 samples per rank and step.
In each round, every contender trains an epoch of four and a half commit intervals. In the middle of the fourth
interval, one rank kills itself, rank 0 and rank 1 in alternation:

- ``ddp_spawn_elastic_ext``: workers of ``fit``;
- ``ddp_elastic_ext``: ranks of torchrun, which restarts them;
- Lightning's ``ddp``, also under torchrun, with a ModelCheckpoint that writes at the same interval, and
  ``ckpt_path="last"``;
- torchft (``pip install torchft-nightly``; omitted if it is not installed): two replica groups of one rank, with the
  settings of its README. This program restarts a group immediately after the kill.

Plain torch DDP over gloo, without a kill, gives the time of a step. The time of a commit is the additional time between
the ends of two steps with a commit between them (medians of a run). Runs with many parameters have a short interval,
because they would take hours otherwise. A step at the default interval of 100 is computed as a step and a hundredth of
a commit.
"""

import argparse
import sys
from functools import partial
from importlib.metadata import packages_distributions, version
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import against
from benchmarks.plots import draw_plot
from benchmarks.rank_loss_runs import HAS_TORCHFT, run
from benchmarks.rank_loss_training import CONTENDERS, PLAIN, RESTARTED, SPAWN, STOCK, TORCHFT, Job
from benchmarks.report import DEFAULT_OUTPUT, Spread, print_goals, print_table, rotated, write_json
from benchmarks.turns import Part, Row

DEFAULT_INTERVAL = 100
#: Number of parameters, in millions, from which the interval is short.
LARGE_MILLIONS = 10
SHORT_INTERVAL = 4

Samples = dict[str, list[dict[str, float]]]


def measure(names: list[str], millions: int, interval: int, rounds: int, heartbeat_timeout_ms: int) -> Samples:
    """Measures all contenders, round by round.

    Returns:
        Results of each round, by contender.
    """
    samples: Samples = {name: [] for name in names}
    for number in range(rounds):
        for name in rotated(names, number):
            samples[name].append(run(Job("", name, millions, interval, number % 2), heartbeat_timeout_ms))
        print(f"{millions} M parameters: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return samples


def rows(names: list[str], millions: int, interval: int) -> dict[str, Row]:
    """Returns the rows of ``--against``: the strategies of this package."""

    def measure(name: str, rounds: "count[int]") -> dict[str, float]:
        found = run(Job("", name, millions, interval, next(rounds) % 2), heartbeat_timeout_ms=0)
        return {f"{name}, {millions} M: {text}": found[figure] for figure, text in FIGURES_OF_ROWS.items()}

    return {
        f"{name}, {millions} M": Row(partial(measure, name, count()), [needed])
        for name, needed in {SPAWN: "spawn_elastic", RESTARTED: "DDPElasticStrategy"}.items()
        if name in names
    }


def summarize(samples: Samples) -> dict[str, dict[str, Spread]]:
    """Returns the spreads of each contender by name, including figures that are derived from others within a round.

    The derived figures are ``at_default_ms``, the time of a step at the default interval; ``over_plain`` and
    ``over_own``, its ratios to a plain step and to a step of the contender without commits; and ``restart_s``, for
    stock, the time to its next step without the time of loading the checkpoint.
    """
    summary = {}
    for name, rounds in samples.items():
        for one, plain in zip(rounds, samples[PLAIN], strict=True):
            # Plain torch and torchft have no commits, so their figures are noise.
            commit_ms = 0.0 if name in (PLAIN, TORCHFT) else one["commit_ms"]
            one["commit_ms"] = commit_ms
            one["at_default_ms"] = one["step_ms"] + commit_ms / DEFAULT_INTERVAL
            one["over_plain"] = one["at_default_ms"] / plain["step_ms"]
            one["over_own"] = one["at_default_ms"] / one["step_ms"]
            if name == STOCK:
                one["restart_s"] = one["next_s"] - one["loading_s"]
        summary[name] = {figure: Spread.of([one[figure] for one in rounds]) for figure in rounds[0]}
    return summary


def goals(summary: dict[str, dict[str, Spread]], millions: int) -> list[dict[str, Any]]:
    """Returns the goals, and whether they are met."""
    found = []

    def add(goal: str, case: str, reached: Spread, most: float) -> None:
        is_met = reached.median <= most
        found.append(
            {"goal": goal, "case": case, "wanted": f"<= {most:.2f}", "reached": reached.median, "is_met": is_met}
        )

    for name in [name for name in (SPAWN, RESTARTED) if name in summary]:
        add("step at the default interval over plain", name, summary[name]["over_plain"], 1.02)
        add("the same over a step without commits", name, summary[name]["over_own"], 1.02)
    if millions == 1 and SPAWN in summary:
        add("s from the kill to the next step", SPAWN, summary[SPAWN]["next_s"], 0.5)
    if STOCK in summary and RESTARTED in summary:
        restart_s = summary[STOCK]["restart_s"].median
        add("the same: stock's restart and 1 s", RESTARTED, summary[RESTARTED]["next_s"], restart_s + 1)
    return found


def show(summary: dict[str, dict[str, Spread]], about: str, caption: str) -> None:
    """Prints the tables."""
    print_table(
        f"Steps, {about}: median [quartiles]",
        ["", "step, ms", "commit, ms", "at interval 100 / plain", "/ without commits"],
        [
            [name, *(found[figure].text(digits) for figure, digits in STEP_FIGURES.items())]
            for name, found in summary.items()
        ],
        caption,
    )
    print_table(
        f"From the kill, {about}: median [quartiles]",
        ["", "to the next step, s", "to where it was, s", "samples redone", "twice", "lost"],
        [
            [name, *(found[figure].text(digits) for figure, digits in KILL_FIGURES.items())]
            for name, found in summary.items()
            if name != PLAIN
        ],
        f"Without loading its checkpoint, stock would take {summary[STOCK]['restart_s'].text()} s to its next step."
        if STOCK in summary
        else "",
    )


STEP_FIGURES = {"step_ms": 2, "commit_ms": 2, "over_plain": 3, "over_own": 4}
FIGURES_OF_ROWS = {
    "step_ms": "step, ms",
    "commit_ms": "commit, ms",
    "next_s": "kill to next step, s",
    "back_s": "kill to recovered step, s",
}
KILL_FIGURES = {"next_s": 2, "back_s": 2, "redone": 0, "twice": 0, "lost": 0}


def write(output: Path, summary: dict[str, dict[str, Spread]], millions: int, settings: dict[str, Any]) -> None:
    """Writes the JSON file and draws the plot."""
    name = f"lost_rank_{millions}m"
    results = {name: {figure: vars(spread) for figure, spread in found.items()} for name, found in summary.items()}
    file = write_json(output, name, {"settings": settings, "results": results, "goals": goals(summary, millions)})
    draw_plot(file)


def version_of_torchft() -> str:
    """Returns the name and the version of the installed distribution of torchft."""
    name = packages_distributions()["torchft"][0]
    return f"{name} {version(name)}"


def main() -> None:
    """Measures, prints the tables, writes the JSON files, and draws the plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[1, 100], help="millions of parameters")
    parser.add_argument("--rounds", type=int, help="rounds: by default 7, 3 with many parameters")
    parser.add_argument("--interval", type=int, help="steps between commits: by default 100, 4 with many parameters")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS[1:], default=CONTENDERS[1:])
    parser.add_argument(
        "--heartbeat-timeout-ms",
        type=int,
        default=5000,
        help="heartbeat timeout of torchft's lighthouse, in ms; torchft's default is 5000",
    )
    parser.add_argument("--output", type=Path, help=f"directory of the JSON files and plots: {DEFAULT_OUTPUT}")
    against.add_arguments(parser)
    arguments = parser.parse_args()
    settings_of = {
        millions: {
            "interval": arguments.interval or (SHORT_INTERVAL if millions >= LARGE_MILLIONS else DEFAULT_INTERVAL),
            "rounds": arguments.rounds or (3 if millions >= LARGE_MILLIONS else 7),
        }
        for millions in arguments.parameters
    }
    if arguments.against:
        parts = [
            Part(
                "benchmarks.rank_loss:rows",
                settings["rounds"],
                {"names": arguments.contenders, "millions": millions, "interval": settings["interval"]},
            )
            for millions, settings in settings_of.items()
        ]
        against.compare("lost_rank", arguments, parts)
        return
    names = [PLAIN, *arguments.contenders]
    if TORCHFT in names and not HAS_TORCHFT:
        print("torchft is not installed, and is omitted: pip install torchft-nightly", file=sys.stderr)
        names.remove(TORCHFT)
    about_torchft = version_of_torchft() if TORCHFT in names else ""
    for millions, settings in settings_of.items():
        settings = {**settings, "heartbeat_timeout_ms": arguments.heartbeat_timeout_ms}
        summary = summarize(measure(names, millions, **settings))
        about = f"{millions} M parameters, 2 CPU ranks, a commit every {settings['interval']} steps"
        show(summary, about, about_torchft)
        print_goals(goals(summary, millions))
        write(arguments.output or DEFAULT_OUTPUT, summary, millions, settings)


if __name__ == "__main__":
    main()

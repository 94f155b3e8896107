"""Milliseconds per training step on Horovod: `horovod_ext`, a hand-written Horovod loop, and Lightning's stock `ddp`.

    python -m benchmarks.horovod
    python -m benchmarks.horovod --hidden 32 --rounds 30
    python -m benchmarks.horovod --quick
    python -m benchmarks.horovod --elastic    # commits, and the loss of a rank: see benchmarks/horovod_elastic.py

Two CPU ranks on this host, one torch thread each, a 64-h-h-10 MLP, 32 samples per rank and batch, SGD, data in memory.
All cases are measured with ranks of `horovodrun`, over Horovod's gloo, and with ranks of `mpirun`, over MPI. Per width
two cases: plain, and four batches per optimizer step. `ddp` uses torch's gloo with both launchers.

Method: the program measures in turns. A turn starts ranks twice. The first ranks measure `horovod_ext`, with its own
settings of Horovod. The second ranks measure `ddp`, and then the hand-written loop with the default settings of
Horovod. `ddp` is measured before Horovod starts, because Horovod's thread would slow it. The order of the two starts
changes from turn to turn. Each contender trains once per round. A step is one batch, and its time includes all work of
the loop between two batches. The slower rank counts. Ratios are computed between the rounds of one turn. The program
fails if the trained weights of the contenders differ. The bytes that `horovod_ext` passes to Horovod are counted in a
separate training.

Interpretation: Horovod checks for work once per cycle, by default each millisecond, so a step waits for some cycles,
even if it computes little. Over MPI, a waiting rank polls by default, and keeps a core busy on which another rank could
compute. `horovod_ext` changes both settings over MPI. "raw, our settings" is the hand-written loop with these settings,
in the ranks of `horovod_ext`.
"""

import argparse
import sys
from itertools import chain
from typing import Any

from benchmarks.contenders import Case, Length
from benchmarks.horovod_elastic import measure_elastic
from benchmarks.horovod_ranks import BY_HAND, EXT, PEER, measure_ext, measure_others, run_ranks_under
from benchmarks.plots import draw_plot
from benchmarks.report import (
    Spread,
    of_slowest_rank,
    paired_ratio,
    parse,
    print_goals,
    print_table,
    write_json,
)
from lightning_strategies_ext.horovod.runtime import check_installed

ACCUMULATE = 4
LAUNCHER_OF = {"gloo": "horovodrun", "MPI": "mpirun"}
#: Goal by width: largest ratio of the time of `horovod_ext` to the time of the hand-written loop.
MOST_OVER_BY_HAND = {32: 1.5, 1024: 1.1}


def without_missing(transports: list[str]) -> list[str]:
    """Returns the transports of the installed Horovod; prints a message if MPI is missing."""
    import horovod.torch as hvd

    if "MPI" not in transports or hvd.mpi_built():
        return transports
    print(
        "This Horovod was built without MPI, so ranks of mpirun are omitted. To build it with MPI:"
        " python -m lightning_strategies_ext install-horovod --mpi",
        file=sys.stderr,
    )
    return [transport for transport in transports if transport != "MPI"]


def take_turns(
    transport: str, turns: int, cases: list[Case], rounds: int, length: Length
) -> list[list[dict[str, Any]]]:
    """Measures `horovod_ext` and the other contenders in turns, each in new ranks.

    Returns:
        In rank order, per case: ``ms`` (contender → one value per round of all turns), ``calls`` and ``num_bytes``.
    """
    merged: list[list[dict[str, Any]]] = []
    for turn in range(turns):
        for is_ext in (turn % 2 == 0, turn % 2 == 1):
            measure = measure_ext if is_ext else measure_others
            per_rank = run_ranks_under(LAUNCHER_OF[transport], measure, cases, rounds, length)
            merged = merged or [[{"ms": {}} for _ in cases] for _ in per_rank]
            for into, result in zip(chain(*merged), chain(*per_rank), strict=True):
                for name, samples in result.pop("ms").items():
                    into["ms"].setdefault(name, []).extend(samples)
                into.update(result)
        print(f"{transport}: turn {turn + 1} of {turns} is measured", file=sys.stderr, flush=True)
    return merged


def summarize(transport: str, case: Case, per_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the measurements of one case; the slower rank of a round counts."""
    ms = of_slowest_rank([rank["ms"] for rank in per_rank])
    return {
        "case": f"{transport} {case.label}",
        "transport": transport,
        "hidden": case.hidden,
        "accumulate": case.accumulate,
        "ms_per_step": {name: vars(Spread.of(samples)) for name, samples in ms.items()},
        "ratios": {
            f"{EXT}/{name}": vars(paired_ratio(ms[EXT], samples)) for name, samples in ms.items() if name != EXT
        },
        "sent_per_step": {name: per_rank[0][name] for name in ("calls", "num_bytes")},
        "rounds_ms_per_step": {name: [round(sample, 4) for sample in samples] for name, samples in ms.items()},
    }


def compare_with_goals(summaries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the goals with the reached values: per goal and case ``wanted``, ``reached``, and ``is_met``."""
    rows = []
    bytes_when_plain = {
        (summary["transport"], summary["hidden"]): summary["sent_per_step"]["num_bytes"]
        for summary in summaries
        if summary["accumulate"] == 1
    }
    for summary in summaries:
        ratios = {name: ratio["median"] for name, ratio in summary["ratios"].items()}
        most = MOST_OVER_BY_HAND.get(summary["hidden"])
        if most is not None:
            reached = ratios[f"{EXT}/{BY_HAND}"]
            rows.append((f"{EXT}/{BY_HAND}", summary["case"], f"at most {most}", reached, reached <= most))
        if summary["transport"] == "MPI":
            reached = ratios[f"{EXT}/{PEER}"]
            rows.append((f"{EXT}/{PEER}", summary["case"], "below 1", reached, reached < 1))
        if summary["accumulate"] > 1:
            plain = bytes_when_plain[summary["transport"], summary["hidden"]]
            reached, wanted = summary["sent_per_step"]["num_bytes"] / plain, 1 / summary["accumulate"]
            rows.append(("bytes per step/plain", summary["case"], f"{wanted:g}", reached, reached == wanted))
    return [dict(zip(("goal", "case", "wanted", "reached", "is_met"), row, strict=True)) for row in rows]


def present(summaries: list[dict[str, Any]], goals: list[dict[str, Any]]) -> None:
    """Prints the tables."""
    names, ratios = list(summaries[0]["ms_per_step"]), list(summaries[0]["ratios"])
    labels = [summary["case"] for summary in summaries]
    times = {name: [Spread(**summary["ms_per_step"][name]) for summary in summaries] for name in names}
    factors = {name: [Spread(**summary["ratios"][name]) for summary in summaries] for name in ratios}
    print_table(
        f"ms per training step, 2 CPU ranks: median [quartiles]; calls and kB that {EXT} sends per step",
        ["case", *names, "calls", "kB"],
        [
            [
                label,
                *(times[name][row].text() for name in names),
                f"{summaries[row]['sent_per_step']['calls']:g}",
                f"{summaries[row]['sent_per_step']['num_bytes'] / 1e3:.1f}",
            ]
            for row, label in enumerate(labels)
        ],
    )
    print_table(
        f"Time of {EXT} over the time of the others: median over rounds [quartiles]",
        ["case", *ratios],
        [[label, *(factors[name][row].text() for name in ratios)] for row, label in enumerate(labels)],
        caption=f"A ratio below 1 means that {EXT} is faster.",
    )
    print_goals(goals)


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 256, 1024], help="widths of the hidden layers")
    parser.add_argument("--transports", nargs="+", choices=LAUNCHER_OF, default=list(LAUNCHER_OF), help="to measure")
    parser.add_argument("--turns", type=int, default=6, help="number of times that all ranks are started")
    parser.add_argument("--rounds", type=int, default=3, help="rounds per case and turn")
    parser.add_argument("--steps", type=int, default=48, help="timed batches per round, made a multiple of 4")
    parser.add_argument("--elastic", action="store_true", help="measure the cost of elastic training instead")
    parser.add_argument("--parameters", type=int, nargs="+", default=[1, 100], help="with --elastic: in millions")
    arguments = parse(parser, "one turn of two rounds of 20 steps", turns=1, rounds=2, steps=20, parameters=[1])
    if min(arguments.turns, arguments.rounds, arguments.steps) < 1:
        parser.error("--turns, --rounds and --steps must be positive")
    return arguments


def main() -> None:
    """Measures, prints the tables, writes the JSON file, and draws the plot."""
    arguments = parse_arguments()
    check_installed()
    if arguments.elastic:
        measure_elastic(arguments.turns, arguments.parameters, arguments.output)
        return
    # A multiple of the accumulation, so that the timed batches contain whole optimizer steps.
    length = Length(warmup=2 * ACCUMULATE, steps=-(-arguments.steps // ACCUMULATE) * ACCUMULATE)
    cases = [case for hidden in arguments.hidden for case in (Case(hidden), Case(hidden, accumulate=ACCUMULATE))]
    summaries = []
    for transport in without_missing(arguments.transports):
        per_rank = take_turns(transport, arguments.turns, cases, arguments.rounds, length)
        summaries += [summarize(transport, case, list(ranks)) for case, *ranks in zip(cases, *per_rank, strict=True)]
    if not summaries:
        sys.exit(1)
    goals = compare_with_goals(summaries)
    present(summaries, goals)
    settings = {"turns": arguments.turns, "rounds": arguments.rounds, "warmup": length.warmup, "steps": length.steps}
    draw_plot(write_json(arguments.output, "horovod", {"settings": settings, "goals": goals, "results": summaries}))


if __name__ == "__main__":
    main()

"""``python -m tests.conformance``: compares ``shm`` with gloo on torch's cases and on programs of this repository.

The command writes the table of outcomes into ``docs/conformance.md``. It fails if a case that passes over gloo fails
over ``shm`` and is not in :mod:`.exceptions`, or if a case in that list passes.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.conformance import program_cases, report, torch_cases
from tests.conformance.exceptions import EXCEPTIONS
from tests.conformance.outcomes import BACKENDS, FAILED, PASSED, SKIPPED, Outcome, Outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.splitlines()[0])
    parser.add_argument(
        "cases", nargs="*", help="names of cases, or prefixes that end in a dot or an asterisk; by default all cases"
    )
    parser.add_argument(
        "--without-gloo", action="store_true", help="run torch's cases over shm, and only failed cases over gloo"
    )
    parser.add_argument("--report", type=Path, help="Markdown file for the table")
    parser.add_argument("--json", type=Path, help="file for the outcomes, with the tracebacks of failures")
    options = parser.parse_args(arguments)
    names = [*torch_cases.names(), *program_cases.names()]
    chosen = [name for name in names if not options.cases or any(is_selected(name, case) for case in options.cases)]
    start_server()
    outcomes = run_all(chosen, with_gloo=not options.without_gloo)
    problems = find_problems(outcomes, is_complete=not options.cases)
    if options.report:
        options.report.write_text(report.markdown(outcomes))
    if options.json:
        options.json.write_text(report.as_json(outcomes))
    print(report.summary(outcomes))
    print("\n".join(problems))
    return 1 if problems else 0


def is_selected(name: str, case: str) -> bool:
    """Returns whether a name equals a selected name, or begins with a selected prefix."""
    return name == case or (case.endswith((".", "*")) and name.startswith(case.rstrip("*")))


def start_server() -> None:
    """Starts a fork server for the ranks of all cases, which has imported the modules that they need."""
    multiprocessing.set_forkserver_preload([torch_cases.__name__, *program_cases.modules(), "torch._dynamo"])
    program_cases.ranks.start_server()


def run_all(names: Sequence[str], *, with_gloo: bool = True) -> Outcomes:
    """Runs cases over both backends. Cases that gloo skips are not run over ``shm``. Failed cases run a second time.

    Args:
        names: Names of the cases.
        with_gloo: Whether torch's cases run over gloo first; otherwise only failed cases run over gloo. Programs always
            run over gloo.
    """
    outcomes: Outcomes = {}
    begin = time.monotonic()
    for number, name in enumerate(names, start=1):
        if with_gloo or not is_of_torch(name):
            gloo = shm = run_twice_if_needed(name, "gloo")
            if gloo.kind != SKIPPED:
                shm = run_twice_if_needed(name, "shm", gloo)
        else:
            shm = run_twice_if_needed(name, "shm")
            gloo = run_twice_if_needed(name, "gloo") if shm.kind == FAILED else Outcome(shm.kind, shm.why)
        outcomes[name] = dict(zip(BACKENDS, (gloo, shm), strict=True))
        results_text = ", ".join(f"{backend} {outcome_text(outcome)}" for backend, outcome in outcomes[name].items())
        print(f"[{number}/{len(names)}, {time.monotonic() - begin:.0f} s] {name}: {results_text}", flush=True)
    return outcomes


def is_of_torch(name: str) -> bool:
    """Returns whether a case is torch's, and not a program of this repository."""
    return name.partition(".")[0] in torch_cases.SUITES


def run_twice_if_needed(name: str, backend: str, gloo: Outcome | None = None) -> Outcome:
    """Runs a case, and repeats an unexpected failure. The second outcome counts, and records that it is the second."""
    first = run(name, backend, gloo)
    if first.kind != FAILED or name in EXCEPTIONS or (gloo is not None and gloo.kind == FAILED):
        return first
    second = run(name, backend, gloo)
    if second.kind == FAILED:
        return second
    return Outcome(
        second.kind, f"failed the first time: {first.why}", second.seconds, first.details, second.result, attempts=2
    )


def run(name: str, backend: str, gloo: Outcome | None = None) -> Outcome:
    """Runs a case; a program's results over ``shm`` must equal its results over gloo."""
    if is_of_torch(name):
        return torch_cases.run(name, backend)
    outcome = program_cases.run(name, backend)
    return outcome if gloo is None else program_cases.compared(gloo, outcome)


def find_problems(outcomes: Outcomes, *, is_complete: bool) -> list[str]:
    """Returns one line for each problem of the outcomes or of the list of exceptions."""
    problems = []
    for name, of in outcomes.items():
        is_worse = of["gloo"].kind == PASSED and of["shm"].kind != PASSED
        if is_worse and name not in EXCEPTIONS:
            problems.append(f"FAILED over shm and not in the list of exceptions: {name}: {of['shm'].why}")
        elif name in EXCEPTIONS and of["shm"].kind == PASSED:
            problems.append(f"PASSED over shm, but in the list of exceptions: {name}")
    if is_complete:
        for name in EXCEPTIONS.keys() - outcomes.keys():
            print(f"in the list of exceptions, but this torch has no such case: {name}")
    return problems


def outcome_text(outcome: Outcome) -> str:
    """Formats an outcome as a short text."""
    return f"{outcome.kind}{f' ({outcome.why})' if outcome.why else ''} {outcome.seconds:.1f} s"


if __name__ == "__main__":
    sys.exit(main())

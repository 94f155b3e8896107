"""The table of outcomes."""

import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone

import torch

from tests.conformance.exceptions import EXCEPTIONS
from tests.conformance.outcomes import FAILED, PASSED, SKIPPED, Outcomes
from tests.conformance.torch_cases import EXCLUDED, WORLD_SIZE

HEADING = """# Torch's own tests, over `shm`

`make conformance` writes this page. It runs two sets of cases over gloo, and then over [`shm`](shm.md):

- the cases for process groups that torch's wheel contains;
- programs of this package for features without such cases: FSDP2, DTensor, functional collectives, ZeRO, checkpoints,
  and others. A program passes over `shm` if its results are bitwise identical to the results over gloo.

Each case that passes over gloo must pass over `shm`, or be listed with a reason in `tests/conformance/exceptions.py`.
Otherwise the command fails. It also fails if the list contains a case that passes.

In torch's cases, the backend is called "gloo", and `shm` replaces each group that would use gloo. A check at the
creation of a group verifies this. Cases that require GPUs run on the CPU, where `.cuda()` has no effect. Cases that
need a GPU for other reasons fail over gloo, and do not count. A failed case runs a second time. Cases that pass the
second time are in a separate table.
"""


def summary(outcomes: Outcomes) -> str:
    """Returns a table of the number of passed cases, by suite."""
    return "\n".join(_summary(outcomes))


def markdown(outcomes: Outcomes) -> str:
    """Returns the whole report."""
    day = datetime.now(timezone.utc).date()
    where = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    parts = [
        HEADING,
        f"{day}: {where}; {WORLD_SIZE} ranks for `DistributedTest`.\n",
        *_summary(outcomes),
        "\n## Passed with gloo and not with `shm`\n",
        *_table(("case", "why"), _worse(outcomes)),
        "\n## Passed at the second attempt\n",
        *_table(("case", "backend", "the first time"), _repeated(outcomes)),
        "\n## Not passed with gloo\n",
        *_table(("case", "with gloo", "with `shm`"), _not_passed_with_gloo(outcomes)),
        "\n## Not run\n",
        *_table(("reason", "cases"), _skipped(outcomes)),
        "\n## Passed with both\n",
        *_table(("suite", "cases"), _passed(outcomes)),
    ]
    return "\n".join(parts) + "\n"


def as_json(outcomes: Outcomes) -> str:
    """Returns the outcomes as JSON, without the results of programs."""
    fields = ("kind", "why", "seconds", "attempts", "details")
    return json.dumps(
        {
            name: {backend: {field: getattr(outcome, field) for field in fields} for backend, outcome in of.items()}
            for name, of in outcomes.items()
        },
        indent=1,
    )


def _summary(outcomes: Outcomes) -> Iterator[str]:
    counts: dict[str, Counter[str]] = {}
    for name, of in outcomes.items():
        count = counts.setdefault(name.partition(".")[0], Counter())
        count["cases"] += 1
        count["not run"] += of["gloo"].kind == SKIPPED
        count["gloo"] += of["gloo"].kind == PASSED
        count["shm"] += of["gloo"].kind == PASSED and of["shm"].kind == PASSED
    total = sum(counts.values(), Counter())
    keys = ("cases", "not run", "gloo", "shm")
    rows = [(f"`{suite}`", *(str(count[key]) for key in keys)) for suite, count in counts.items()]
    rows.append(("**together**", *(f"**{total[key]}**" for key in keys)))
    return _table(("suite", "cases", "not run", "passed with gloo", "passed with both"), rows)


def _worse(outcomes: Outcomes) -> Iterator[tuple[str, str]]:
    for name, of in outcomes.items():
        if of["gloo"].kind == PASSED and of["shm"].kind != PASSED:
            yield f"`{name}`", EXCEPTIONS.get(name) or f"**not an expected exception**: {_cell(of['shm'].why)}"


def _repeated(outcomes: Outcomes) -> Iterator[tuple[str, str, str]]:
    for name, of in outcomes.items():
        for backend, outcome in of.items():
            if outcome.attempts > 1:
                yield f"`{name}`", backend, _cell(outcome.why)


def _not_passed_with_gloo(outcomes: Outcomes) -> Iterator[tuple[str, str, str]]:
    for name, of in outcomes.items():
        if of["gloo"].kind == FAILED:
            yield f"`{name}`", _cell(of["gloo"].why), of["shm"].kind


def _skipped(outcomes: Outcomes) -> Iterator[tuple[str, str]]:
    reasons: dict[str, list[str]] = {}
    for name, of in outcomes.items():
        if of["gloo"].kind == SKIPPED:
            reasons.setdefault(of["gloo"].why, []).append(f"`{name}`")
    for reason, names in sorted(reasons.items()):
        yield _cell(reason), ", ".join(names)
    for name, reason in EXCLUDED.items():
        yield _cell(reason), f"`{name}`"


def _passed(outcomes: Outcomes) -> Iterator[tuple[str, str]]:
    suites: dict[str, list[str]] = {}
    for name, of in outcomes.items():
        if of["gloo"].kind == PASSED and of["shm"].kind == PASSED:
            suite, _, case = name.partition(".")
            suites.setdefault(suite, []).append(f"`{case}`")
    for suite, cases in suites.items():
        yield f"`{suite}`", ", ".join(cases)


def _table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    lines = [" | ".join(row) for row in rows]
    if not lines:
        yield "None."
        return
    for line in (" | ".join(heading), " | ".join("---" for _ in heading), *lines):
        yield f"| {line} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

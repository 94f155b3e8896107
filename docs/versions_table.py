"""Writes the test results of one corner of the version matrix into ``docs/versions.md`` and ``docs/version_tests.md``.

    python -m docs.versions_table py310 --report report.xml

``noxfile.py`` runs this module with the interpreter of the corner's environment, whose versions it records. The results
are in ``docs/versions.json``, one entry per corner. ``docs/versions.md`` has a row per corner, and
``docs/version_tests.md`` lists the failed and skipped tests. Both pages are generated from all entries, so a run of one
corner does not change the results of other corners. A ``note`` in an entry is edited by hand; it is removed when that
corner runs again.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from os import cpu_count
from pathlib import Path
from typing import Any

from lightning_strategies_ext.horovod_build.installed import horovod_problem, marker, torch_version

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "docs" / "versions.json"
PAGE = REPOSITORY / "docs" / "versions.md"
DETAILS = REPOSITORY / "docs" / "version_tests.md"
#: Files that determine what is installed.
PACKAGE_FILES = ("lightning_strategies_ext", "pyproject.toml", "hatch_build.py")
BEGIN, END = "<!-- written by docs/versions_table.py -->", "<!-- end of what is written -->"
_LONGEST_REASON = 300


def outcomes(reports: Sequence[Path]) -> dict[str, Any]:
    """Reads JUnit reports of pytest: returns counts, names of failed tests, and skipped tests by reason."""
    failed: list[str] = []
    skipped: dict[str, list[str]] = {}
    num_passed = 0
    seconds = 0.0
    for suite in (suite for report in reports for suite in ElementTree.parse(report).iter("testsuite")):
        seconds += float(suite.get("time", 0))
        for case in suite.iter("testcase"):
            name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
            if not name:  # an interrupted test has no name in the report
                continue
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(name)
            elif skip is not None:
                skipped.setdefault(skip.get("message", "").removeprefix("Skipped: "), []).append(name)
            else:
                num_passed += 1
    return {"passed": num_passed, "failed": failed, "skipped": skipped, "minutes": round(seconds / 60, 1)}


def environment_info(horovod_log: Path | None) -> dict[str, Any]:
    """Returns the versions and the system that the tests ran with.

    Args:
        horovod_log: Output of the Horovod build, if it failed.
    """
    system = platform.freedesktop_os_release()["PRETTY_NAME"] if sys.platform == "linux" else platform.platform()
    horovod = (marker() or {}).get("horovod")
    problem = _last_line(horovod_log.read_text(errors="replace")) if horovod_log else horovod_problem()
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch_version(),
        "lightning": _version("lightning") or f"{_version('pytorch-lightning')} (pytorch_lightning)",
        "horovod": None if problem else horovod or _version("horovod"),
        "horovod_problem": problem,
        "system": f"{system}, {platform.machine()}, {cpu_count()} CPUs",
    }


def page(file: Path, generated: str) -> str:
    """Returns a page with a new generated part.

    Raises:
        ValueError: If the page does not have the lines around the generated part.
    """
    before, _, rest = file.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{file} lacks the lines {BEGIN!r} and {END!r}, which enclose the generated table")
    return f"{before}{BEGIN}\n\n{generated}\n{END}{after}"


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a table with a row per corner."""
    columns = (
        "corner",
        "Python",
        "torch",
        "Lightning",
        "Horovod",
        "tests",
        "passed",
        "failed",
        "skipped",
        "minutes",
        "commit",
    )
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    lines += [f"| {' | '.join(_row(name, entry))} |" for name, entry in results.items()]
    return "\n".join(lines) + "\n"


def details(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a section per corner with its date, system, note, and failed and skipped tests."""
    sections = (
        "\n".join([f"## {name}", "", f"{entry['date']}, on {entry['system']}.", *_remarks(entry)])
        for name, entry in results.items()
    )
    return "\n\n".join(sections) + "\n"


def _row(name: str, entry: Mapping[str, Any]) -> list[str]:
    versions = [entry[key] or "none" for key in ("python", "torch", "lightning", "horovod")]
    if "passed" not in entry:
        return [name, *versions, "", "not run", "", "", "", entry["commit"]]
    num_skipped = sum(map(len, entry["skipped"].values()))
    passed = f"{entry['passed']} (not all run)" if "problem" in entry else entry["passed"]
    numbers = [passed, len(entry["failed"]), num_skipped, entry["minutes"]]
    return [name, *versions, f"`{entry['tests']}`", *map(str, numbers), entry["commit"]]


def _remarks(entry: Mapping[str, Any]) -> list[str]:
    lines = [entry["note"]] if "note" in entry else []
    if "problem" in entry:
        lines.append(f"{'Not all tests have run' if 'passed' in entry else 'Not run'}: {entry['problem']}.")
    elif entry["horovod_problem"]:
        lines.append(f"No Horovod: {entry['horovod_problem']}")
    bullets = [f"- failed: `{name}`" for name in entry.get("failed", [])]
    for reason, names in sorted(entry.get("skipped", {}).items()):
        bullets.append(f"- skipped: {_in_one_line(reason)} ({_counted(names)})")
    return [*lines, "", *bullets] if bullets else lines


def _counted(names: Sequence[str]) -> str:
    """Returns the names of the tests, or their number and modules if there are many."""
    if len(names) <= 3:
        return ", ".join(f"`{name}`" for name in names)
    modules = sorted({name.partition("::")[0] for name in names})
    return f"{len(names)} tests of {', '.join(f'`{module}`' for module in modules)}"


def _in_one_line(text: str) -> str:
    """Returns a text as one line of Markdown, without line breaks and without directories of this machine."""
    line = re.sub(r"\s+", " ", text).strip().replace(str(REPOSITORY) + "/", "").replace(str(Path.home()), "~")
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}…"


def _last_line(log: str) -> str:
    """Returns the end of a log, which contains the error message."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return _in_one_line(" ".join(lines[-3:])) or "the build failed without output"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """Returns the last commit that changed the package, and whether the package had uncommitted changes."""
    git = ("git", "-C", str(REPOSITORY))
    find_commit = [*git, "log", "-1", "--format=%h", "--", *PACKAGE_FILES]
    find_changes = [*git, "status", "--porcelain", "--untracked-files=no", "--", *PACKAGE_FILES]
    try:
        commit, changes = (
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            for command in (find_commit, find_changes)
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return (commit or "unknown") + (" with changes" if changes else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Stores the results of one corner, and writes both pages."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("corner")
    parser.add_argument("--tests", default="make test-all", help="the command of the Makefile that runs the same tests")
    parser.add_argument("--report", type=Path, nargs="+", default=[], help="the JUnit reports of pytest, one per run")
    parser.add_argument("--horovod-log", type=Path, help="output of the Horovod build, if it failed")
    parser.add_argument("--problem", help="the reason why tests did not run, if any")
    given = parser.parse_args(arguments)
    entry = environment_info(given.horovod_log) | {"tests": given.tests}
    if given.problem:
        entry["problem"] = given.problem
    if reports := [report for report in given.report if report.exists()]:
        entry |= outcomes(reports)
    elif not given.problem:
        entry["problem"] = "pytest ended without a report"
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = dict(sorted({**results, given.corner: entry}.items()))
    texts = {PAGE: page(PAGE, table(results)), DETAILS: page(DETAILS, details(results))}
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    for file, text in texts.items():
        file.write_text(text)


if __name__ == "__main__":
    main()

"""Comparison of the working tree with another revision of the package, for ``--against REV`` of six benchmarks.

    python -m benchmarks.step_time --against HEAD~1
    python -m benchmarks.step_time --against 6a9b84b --rounds 40 --rows plain
    python -m benchmarks.collectives --against main --part operations

REV is checked out into a temporary git worktree. Each revision is measured in separate processes. Their ``sys.path``
begins with a directory that contains the current ``benchmarks`` and the revision's package, and their cache directory
contains the native library of the revision, built before the first measurement. Today's program therefore measures both
revisions; :mod:`benchmarks.names` maps its names to those of each revision.

The two revisions measure a row within seconds of each other, in an order that alternates. The ratio of a row is
computed within a round, and the table shows its median over rounds with quartiles. Ranks are started again every few
rounds, because one process can be slower than another for its whole lifetime. Only strategies of this package are
measured. The ratio of a control, a row that does not depend on the package, shows the noise of the machine.

Rows that a revision lacks are listed. The worktree is removed at the end; after a SIGKILL, use ``git worktree prune``.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.names import CACHE_VARIABLES, PACKAGE, PACKAGE_VARIABLE
from benchmarks.rank_launcher import end_tree
from benchmarks.report import DEFAULT_OUTPUT, Spread, paired_ratio, print_table, write_json
from benchmarks.turns import Part

ROOT = Path(__file__).resolve().parents[1]
#: Directory of results, which git ignores: comparisons of two revisions are not published.
OUTPUT = DEFAULT_OUTPUT / "against"
#: Directory of a revision's native build.
CACHE = "cache"
#: Number of rounds before ranks are started again, without their first round, which is not counted.
ROUNDS_PER_START = 5
#: Timeout for the start of the processes of a part, in seconds, which only a hang reaches.
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 30.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Revision:
    """One of the two revisions.

    Attributes:
        name: Its column in the table.
        about: The commit, with its subject.
        directory: Directory that processes of the revision run in and import from.
        environment: Environment variables of these processes.
    """

    name: str
    about: str
    directory: Path
    environment: dict[str, str]


class MeasuredProcess:
    """The process, or ranks, in which one revision measures the rows of a part.

    Args:
        revision: The revision.
        part: The part.
        chosen: Substrings that select rows by name; empty for all rows.
    """

    def __init__(self, revision: Revision, part: Part, chosen: Sequence[str]) -> None:
        self.revision = revision
        self.output = revision.directory / "output"
        self.connection: Connection | None = None
        address = str(revision.directory / "turns.socket")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.settimeout(_POLL_S)
        with suppress(FileNotFoundError):
            os.unlink(address)
        self.listener.bind(address)
        self.listener.listen(1)
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.turns", part.to_json(), address, *chosen],
                cwd=revision.directory,
                env=revision.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C interrupts the comparing process only, which then kills this one
            )

    def receive(self) -> Any:
        """Receives the next message of the process.

        Raises:
            RuntimeError: If the process has exited.
        """
        try:
            if self.connection is None:
                self.connection = self._accept()
            while not self.connection.poll(_POLL_S):
                if self.process.poll() is not None:
                    raise EOFError
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self._fail("ended")

    def _accept(self) -> Connection:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with suppress(TimeoutError):
                return Connection(self.listener.accept()[0].detach())
            if self.process.poll() is not None:
                raise EOFError
            if time.monotonic() > deadline:
                end_tree(self.process)
                self._fail(f"did not start within {START_TIMEOUT_S:g} s")

    def _fail(self, problem: str) -> NoReturn:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_TIMEOUT_S)
        output = self.output.read_text(errors="replace")[-20_000:]
        raise RuntimeError(f"The measured process of {self.revision.name} {problem}:\n{output}")

    def measure(self, row: str) -> dict[str, float]:
        """Measures a row once."""
        assert self.connection is not None
        with suppress(ConnectionError):  # `receive` raises an error with the reason
            self.connection.send(row)
        figures: dict[str, float] = self.receive()
        return figures

    def __enter__(self) -> "MeasuredProcess":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Lets the process return after its last turn; kills it after an error or Ctrl-C."""
        if error_type is None and self.connection is not None:
            with suppress(ConnectionError):
                self.connection.send(None)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_TIMEOUT_S)
        end_tree(self.process)
        with suppress(ProcessLookupError):  # after an exit of the process, its ranks may still run in its session
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.connection is not None:
            self.connection.close()
        self.listener.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--against`` and ``--rows`` to the command line of a benchmark."""
    parser.add_argument("--against", metavar="REV", type=to_commit, help="compare the working tree with this revision")
    parser.add_argument(
        "--rows",
        metavar="TEXT",
        nargs="+",
        default=[],
        help="with --against: only rows that contain one of these texts",
    )


def to_commit(revision: str) -> str:
    """Returns the full hash of a revision.

    Raises:
        argparse.ArgumentTypeError: If the repository does not have it.
    """
    found = run_git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", check=False)
    if not found:
        raise argparse.ArgumentTypeError(
            f"there is no commit {revision!r} in the git history of {ROOT.name}. Give a commit, branch or tag that `git"
            " log` knows; in a shallow clone, run `git fetch --unshallow` before."
        )
    return found


def run_git(*arguments: str, check: bool = True) -> str:
    """Runs git in the checkout and returns what it prints; without ``check`` also after it has failed."""
    try:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=check)
    except FileNotFoundError:
        raise RuntimeError("`--against` requires git, which is not installed.") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"`git {' '.join(arguments)}` failed: {error.stderr.strip()}") from None
    return done.stdout.strip()


def compare(program: str, arguments: argparse.Namespace, parts: Sequence[Part]) -> None:
    """Measures the working tree and another revision in turns, then prints and writes the ratios.

    Args:
        program: Name of the benchmark.
        arguments: Parsed command line, with ``against``, ``rows``, and ``output`` (None for the default).
        parts: What to measure.
    """
    samples: dict[str, list[tuple[float, float]]] = {}
    omitted: list[str] = []
    with check_out(arguments.against) as (today, other):
        has_native_library = {revision.name: build(revision) for revision in (today, other)}
        for part in parts:
            found, missing = measure_part(part, (today, other), arguments.rows)
            samples |= found
            omitted += missing
    if not samples and not omitted:
        raise SystemExit(f"--rows: no row contains any of {arguments.rows}.")
    present(program, today, other, samples, omitted)
    write_json(
        arguments.output or OUTPUT,
        f"{program}_against_{other.name}",
        {
            "settings": {name: value for name, value in vars(arguments).items() if name != "output"},
            "today": today.about,
            "other": other.about,
            "native library": has_native_library,
            "left out": omitted,
            "results": [summarize(row, today, other, pairs) for row, pairs in samples.items()],
        },
    )


def measure_part(
    part: Part, revisions: tuple[Revision, Revision], chosen: Sequence[str]
) -> tuple[dict[str, list[tuple[float, float]]], list[str]]:
    """Measures the rows of a part in turns.

    Returns:
        Per row, a pair of figures for each round, in the order of the revisions; and the omitted rows, with the names
        that a revision lacks.
    """
    samples: dict[str, list[tuple[float, float]]] = {}
    omitted: dict[str, str] = {}
    rounds_per_start = ROUNDS_PER_START if part.num_ranks else part.rounds
    for start in range(0, part.rounds, rounds_per_start):
        with ExitStack() as stack:
            processes = [stack.enter_context(MeasuredProcess(revision, part, chosen)) for revision in revisions]
            missing = [process.receive() for process in processes]
            for process, by_row in zip(processes, missing, strict=True):
                for row, lacks in by_row.items():
                    if lacks:
                        more = f" and {len(lacks) - 1} more names" if len(lacks) > 1 else ""
                        omitted[row] = f"{row} ({process.revision.name} has no {lacks[0]}{more})"
            rows = [row for row in missing[0] if row not in omitted]
            # New ranks measure a round that does not count, because they import modules and allocate memory in it.
            uncounted = [-1] if part.num_ranks and rows else []
            for number in [*uncounted, *range(start, min(start + rounds_per_start, part.rounds))]:
                for index, row in enumerate(rows):
                    order = processes if (number + index) % 2 == 0 else processes[::-1]
                    figures = {process.revision.name: process.measure(row) for process in order}
                    if number < 0:
                        continue
                    today, earlier = (figures[revision.name] for revision in revisions)
                    for name, figure in today.items():
                        samples.setdefault(name, []).append((figure, earlier[name]))
                if number >= 0 and rows:
                    print(f"{part.rows}: round {number + 1} of {part.rounds}", file=sys.stderr, flush=True)
            if not rows:
                break
    return samples, list(omitted.values())


def build(revision: Revision) -> bool:
    """Compiles the revision's Python files and its native library, so that no measurement contains it.

    Returns:
        Whether the revision's cache directory has a native library now.
    """
    package = revision.directory / PACKAGE
    subprocess.run([sys.executable, "-m", "compileall", "-q", package], env=revision.environment, check=False)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.turns", "--build"],
        cwd=revision.directory,
        env=revision.environment,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        print(f"{revision.name}: {done.stderr.strip()}", file=sys.stderr, flush=True)
    return any((revision.directory / CACHE).rglob("*.so"))


@contextmanager
def check_out(commit: str) -> Iterator[tuple[Revision, Revision]]:
    """Checks out a revision for as long as the context lasts.

    Yields:
        The working tree and the revision.
    """
    # Without a handler, these signals would terminate the process without a cleanup.
    signals = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    handlers = {each: signal.signal(each, _exit_for) for each in signals}
    directory = Path(tempfile.mkdtemp(prefix="against-"))
    worktree = directory / "worktree"
    try:
        # Without hooks, which could run any program.
        run_git("-c", f"core.hooksPath={os.devnull}", "worktree", "add", "--detach", "--quiet", str(worktree), commit)
        head = describe("HEAD")
        if run_git("status", "--porcelain", "--", PACKAGE, "benchmarks"):
            head += ", with changes that are not committed"
        today = prepare("today", head, ROOT, directory / "today")
        yield today, prepare(run_git("rev-parse", "--short", commit), describe(commit), worktree, directory / "other")
    finally:
        for each in signals:  # a second signal must not interrupt the cleanup
            signal.signal(each, signal.SIG_IGN)
        if worktree.exists():
            with suppress(RuntimeError):
                run_git("worktree", "remove", "--force", str(worktree))
        shutil.rmtree(directory, ignore_errors=True)
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _exit_for(number: int, _: object) -> None:
    sys.exit(128 + number)


def describe(revision: str) -> str:
    """Returns the abbreviated hash, date and subject of a revision."""
    return run_git("log", "-1", "--format=%h (%cs) %s", revision)


def prepare(name: str, about: str, checkout: Path, directory: Path) -> Revision:
    """Creates the directory from which processes of a revision import, and returns their environment."""
    temporary, cache = directory / "tmp", directory / CACHE
    for each in (directory, temporary, cache):
        each.mkdir(mode=0o700)
    (directory / PACKAGE).symlink_to(checkout / PACKAGE)
    (directory / "benchmarks").symlink_to(ROOT / "benchmarks")
    path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "TMPDIR": str(temporary),
        PACKAGE_VARIABLE: str((checkout / PACKAGE).resolve()),
        **dict.fromkeys(CACHE_VARIABLES, str(cache)),
    }
    # Each process would compile the modules of a new checkout again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return Revision(name, about, directory, environment)


def summarize(row: str, today: Revision, other: Revision, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Merges the rounds of a row. A row with a figure that is not positive has no ratio: it is a small difference."""
    by_revision = dict(zip((today.name, other.name), zip(*pairs, strict=True), strict=True))
    has_ratio = all(figure > 0 for pair in pairs for figure in pair)
    ratio = vars(paired_ratio(by_revision[today.name], by_revision[other.name])) if has_ratio else None
    return {
        "row": row,
        "figures": {name: vars(Spread.of(figures)) for name, figures in by_revision.items()},
        f"{today.name}/{other.name}": ratio,
        "rounds": {name: [round(figure, 6) for figure in figures] for name, figures in by_revision.items()},
    }


def present(
    program: str,
    today: Revision,
    other: Revision,
    samples: dict[str, list[tuple[float, float]]],
    omitted: Sequence[str],
) -> None:
    """Prints the ratios, and the omitted rows."""
    ratio = f"{today.name}/{other.name}"
    table = []
    for row, pairs in samples.items():
        summary = summarize(row, today, other, pairs)
        figures = [Spread(**summary["figures"][name]) for name in (today.name, other.name)]
        text = Spread(**summary[ratio]).text(3) if summary[ratio] else "-"
        table.append([row, *map(with_three_digits, figures), text, str(len(pairs))])
    if table:
        caption = (
            "Ratios are computed within a round. A ratio above 1 means that today's revision is slower, or uses more.\n"
            f"today: {today.about}\n"
            f"{other.name}: {other.about}"
        )
        columns = ["", today.name, other.name, ratio, "rounds"]
        print_table(f"{program}: two revisions in turns, median [quartiles]", columns, table, caption)
    else:
        print(f"{program}: today and {other.name} ({other.about}) have no row in common.")
    for line in omitted:
        print(f"omitted: {line}")


def with_three_digits(spread: Spread) -> str:
    """Returns the median with its quartiles, each with three significant digits or all before the point."""
    texts = [
        f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
        for value in (spread.median, spread.lower_quartile, spread.upper_quartile)
    ]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"

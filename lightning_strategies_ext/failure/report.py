"""What the user reads of a failure: one block, last, with what failed first; everything else is in a file per rank."""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from lightning_strategies_ext.failure.activity import described, frames_of
from lightning_strategies_ext.failure.signs import Failure, Sign

#: Where the files go, below the directory that the Trainer or the user works in.
DIRECTORY = "failures"
_MAX_DETAILS = 12_000
_MAX_FRAMES = 8

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def failure_of(exception: BaseException, rank: int, where: str) -> Failure:
    """Describes an exception of this rank's."""
    lines = traceback.format_exception_only(exception)
    return Failure(
        ranks=(rank,),
        host=socket.gethostname(),
        time=time.time(),
        where=where,
        headline="".join(lines).strip(),
        frames=tuple(described(frames_of(exception))[-_MAX_FRAMES:]),
        details="".join(traceback.format_exception(exception))[-_MAX_DETAILS:],
        by=rank,
    )


def failure_from_trace(trace: str, rank: int, where: str) -> Failure:
    """Describes a failure of this rank's of which there is a trace."""
    lines = trace.strip().splitlines() or ["it failed"]
    return Failure((rank,), socket.gethostname(), time.time(), where, lines[-1], (), trace[-_MAX_DETAILS:], rank)


def failure_seen(rank: int, sign: Sign, headline: str, by: int) -> Failure:
    """Describes what another rank of this host sees of one that cannot say it."""
    return Failure((rank,), socket.gethostname(), time.time(), sign.where, headline, sign.frames, sign.stack, by)


def failure_stuck(
    ranks: Sequence[int], signs: Mapping[int, Sign], states: Mapping[int, str], details: str, patience_s: float, by: int
) -> Failure:
    """Describes ranks that others wait for in vain."""
    first = signs[ranks[0]]
    waiting = [rank for rank in sorted(signs) if rank not in ranks]
    names = " and ".join(f"rank {rank}" for rank in ranks)
    what = "; ".join(f"rank {rank} {state}" for rank, state in states.items())
    if waiting:
        where = signs[waiting[0]]
        who = ", ".join(map(str, waiting))
        at = f", at {where.frames[-1]}" if where.frames else ""
        what = what or "it has not moved in that time"
        headline = f"rank {who} has waited {patience_s:g} s in {where.collective or 'a collective'}{at}: {what}"
    else:
        headline = f"all have waited {patience_s:g} s, each in a collective that another is not in"
    headline = f"{names} did not come: {headline}" if waiting else headline
    return Failure(tuple(ranks), socket.gethostname(), time.time(), first.where, headline, first.frames, details, by)


def how_it_ended(exit_code: int | None) -> str:
    """In words, how a process has ended; None where that is not known."""
    if exit_code is None:
        return "is gone: it was killed, crashed, or ended by itself"
    if exit_code >= 0:
        return f"ended in the middle of its work, with exit code {exit_code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"was killed by signal {-exit_code}"


def cause(failure: Failure, rank: int) -> str:
    """Why a rank ends, in a line."""
    verb = "does not come" if len(failure.ranks) == 1 else "do not come"
    if "did not come:" in failure.headline:
        return f"{failure.named_ranks} {verb}" if rank not in failure.ranks else failure.headline.splitlines()[0]
    return f"{failure.named_ranks} failed: {failure.headline.splitlines()[0]}"


def summary(failure: Failure) -> str:
    """What failed first, in a few lines."""
    where = f", in {failure.where}" if failure.where else ""
    lines = [f"{failure.named_ranks} on {failure.host} failed first{where}:"]
    lines += [f"  {frame}" for frame in failure.frames]
    return "\n".join([*lines, failure.headline])


def write(directory: str, failure: Failure, rank: int, text: str) -> Path | None:
    """Writes what a rank has to say of a failure to its file.

    Args:
        directory: In which there is a directory of failures, or will be.
        failure: What failed first: by its time ranks find their common directory.
        rank: Which one writes.
        text: What.

    Returns:
        The file; None if it cannot be written.
    """
    name = time.strftime("%Y%m%d-%H%M%S", time.localtime(failure.time))
    path = Path(directory, DIRECTORY, name, f"rank-{rank}.txt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text.rstrip() + "\n")
    except OSError:
        return None
    return path


def show_at_exit(exception: BaseException, failure: Failure, rank: int, directory: str, *, is_speaker: bool) -> None:
    """Shows a short account of a failure in place of the exception's long trace, if nobody catches it.

    Args:
        exception: The one that this rank ends with.
        failure: What failed first.
        rank: This one.
        directory: See :func:`write`.
        is_speaker: Whether it shows the whole account; the others say a line.
    """
    usual: ExceptHook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not exception:
            usual(kind, value, trace)
            return
        path = write(directory, failure, rank, "".join(traceback.format_exception(kind, value, trace)))
        if path is None:
            usual(kind, value, trace)
        if is_speaker:
            _show_block(failure, rank, path)
        elif rank not in failure.ranks:
            say(f"rank {rank} ended because {cause(failure, rank)}")

    sys.excepthook = show


def _show_block(failure: Failure, rank: int, path: Path | None) -> None:
    line = "-" * 80
    text = [line, "lightning-strategies-ext: " + summary(failure)]
    if rank not in failure.ranks:
        text.append(f"Rank {rank} ended because {failure.named_ranks} did.")
    if path is not None:
        text.append(f"What each rank says: {path.parent}{os.sep}rank-*.txt")
    print("\n".join([*text, line]), file=sys.stderr, flush=True)  # noqa: T201


def say(message: str) -> None:
    """Says a line to the user."""
    print(f"lightning-strategies-ext: {message}", file=sys.stderr, flush=True)  # noqa: T201

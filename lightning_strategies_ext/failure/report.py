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
_LINE = "-" * 80

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


def failure_lost(ranks: Sequence[int], host: str, sign: Sign, by: int) -> Failure:
    """Describes a host that has fallen silent, with all its ranks."""
    verb = "is lost" if len(ranks) == 1 else "are lost"
    headline = "the host answers nothing any more: it is down, or the network between is"
    return Failure(tuple(ranks), host, time.time(), sign.where, headline, (), "", by, verb)


def failure_stuck(
    ranks: Sequence[int], signs: Mapping[int, Sign], states: Mapping[int, str], details: str, patience_s: float, by: int
) -> Failure:
    """Describes ranks that others wait for in vain."""
    first = signs[ranks[0]]
    waiting = [rank for rank in sorted(signs) if rank not in ranks]
    if waiting:
        who = " and ".join(f"rank {rank}" for rank in waiting)
        has = "has" if len(waiting) == 1 else "have"
        it = "it" if len(ranks) == 1 else "them"
        what = "; ".join(f"rank {rank} {state}" for rank, state in states.items()) or "no move was seen in that time"
        where = signs[waiting[0]].collective or "a collective"
        headline = f"{who} {has} waited {patience_s:g} s for {it} in {where}; {what}"
    else:
        headline = f"they have waited {patience_s:g} s for each other, in collectives that are not the same"
    verb = "is stuck" if len(ranks) == 1 else "are stuck"
    host, now = socket.gethostname(), time.time()
    return Failure(tuple(ranks), host, now, first.where, headline, first.frames, details, by, verb)


def how_it_ended(exit_code: int | None) -> str:
    """In words, how a process has ended; None where that is not known."""
    if exit_code is None:
        return "is gone: it was killed, crashed, or ended by itself"
    if exit_code >= 0:
        return f"ended in the middle of its work, with exit code {exit_code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"was killed by signal {-exit_code}"


def cause(failure: Failure) -> str:
    """Why ranks end, in a line."""
    return f"{failure.named_ranks} {failure.verb}: {failure.headline.splitlines()[0]}"


def summary(failure: Failure) -> str:
    """What failed first, in a few lines."""
    first = " first" if failure.verb == "failed" else ""
    where = f", in {failure.where}" if failure.where else ""
    lines = [f"{failure.named_ranks} on {failure.host} {failure.verb}{first}{where}:"]
    lines += [f"  {frame}" for frame in failure.frames]
    return "\n".join([*lines, failure.headline])


def message(failure: Failure) -> str:
    """What failed first; if nobody has raised an exception that says more, with what others have seen."""
    is_said = failure.by in failure.ranks or not failure.details
    return summary(failure) if is_said else f"{summary(failure)}\n\n{failure.details}"


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
            ended = "" if rank in failure.ranks else f"Rank {rank} ended because {failure.named_ranks} {failure.verb}."
            files = "" if path is None else f"What each rank says: {path.parent}{os.sep}rank-*.txt"
            show_block(failure, ended, files)
        elif rank not in failure.ranks:
            say(f"rank {rank} ended because {cause(failure)}")

    sys.excepthook = show


def show_block(failure: Failure, *more: str) -> None:
    """Shows what failed first, between two lines, and a few words more."""
    text = [_LINE, f"lightning-strategies-ext: {summary(failure)}", *(words for words in more if words), _LINE]
    print("\n".join(text), file=sys.stderr, flush=True)  # noqa: T201


def say(message: str) -> None:
    """Says a line to the user."""
    print(f"lightning-strategies-ext: {message}", file=sys.stderr, flush=True)  # noqa: T201

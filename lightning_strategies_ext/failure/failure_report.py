"""Failure report: one block, printed last, that names the first failure; each rank's file has the details.

Errors of collectives are completed here too: with the ranks that have not called the collective, and with advice.
"""

import os
import re
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from torch.distributed import DistBackendError

from lightning_strategies_ext._system import flight_recorder
from lightning_strategies_ext._system.call_sites import user_code_frames
from lightning_strategies_ext.failure.failure_detector import Observation
from lightning_strategies_ext.failure.rank_status import Failure, format_ranks

#: Directory of the files, below the working directory or the Trainer's root directory.
DIRECTORY = "failures"
_MAX_DETAILS = 12_000
_MAX_FRAMES = 8
_LINE = "-" * 80
#: Seconds that the text of an exception may take, which code of the user computes.
_TEXT_TIMEOUT_S = 1.0
#: Variables of launchers that terminate all ranks as soon as one has failed.
_LAUNCHER_VARIABLES = {"HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"}
#: Messages of collective errors that are no DistBackendErrors: from gloo and Horovod, and errors that passed C++.
_COLLECTIVE_ERROR_PATTERN = re.compile(
    "gloo|Connection (closed|reset)|DistBackendError|PeerLostError|Horovod|has (ended|left)"
)
_ADVICE = "_lightning_strategies_ext_advice"
_PEER_LOSS_PATTERN = re.compile("Connection|Horovod|has (ended|left|failed)|[Ss]hut ?down|reset by peer")
_TIMEOUT_PATTERN = re.compile("[Tt]imed out|timeout")

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def failure_from_exception(exception: BaseException, rank: int, where: str) -> Failure:
    """Returns the failure of this rank by an exception; waits at most a second for the exception's text."""
    headline, trace = texts_of_exception(exception)
    advice = advice_of(exception)
    return replace(
        failure_from_traceback(trace, rank, where),
        headline=(headline.replace(f"{advice}\n", "", 1) if advice else headline).strip(),
        frames=tuple(user_code_frames(traceback.extract_tb(exception.__traceback__))[-_MAX_FRAMES:]),
        advice=advice,
    )


def failure_from_traceback(trace: str, rank: int, where: str) -> Failure:
    """Returns the failure of this rank with a traceback."""
    headline, details = (trace.strip().splitlines() or ["it failed"])[-1], trace[-_MAX_DETAILS:]
    host, now = socket.gethostname(), time.time()
    return Failure((rank,), host, now, where, headline, details=details, reported_by=rank, is_self_reported=True)


def texts_of_exception(exception: BaseException) -> tuple[str, str]:
    """Returns type and text of an exception, and its traceback, both without the text if that takes too long.

    The text is code of the user, which may block: another thread computes it.
    """
    texts: list[tuple[str, str]] = []

    def compute() -> None:
        only = "".join(traceback.format_exception_only(exception))
        texts.append((only, "".join(traceback.format_exception(exception))))

    thread = threading.Thread(target=compute, name="lightning-strategies-ext text of an exception", daemon=True)
    thread.start()
    thread.join(_TEXT_TIMEOUT_S)
    if texts:
        return texts[0]
    only = f"{type(exception).__qualname__}: <its text took more than {_TEXT_TIMEOUT_S:g} s>\n"
    return only, "".join(["Traceback (most recent call last):\n", *traceback.format_tb(exception.__traceback__), only])


def one_line_cause(failure: Failure) -> str:
    """Returns the failure in one line, without a period at its end."""
    return f"{failure.ranks_text} {failure.verb}: {failure.advice or failure.headline.splitlines()[0]}".rstrip(".")


def summary(failure: Failure) -> str:
    """Returns the failure in a few lines; the first is the advice if there is one."""
    first = " first" if failure.verb == "failed" else ""
    seen = "in" if failure.is_self_reported else "last seen in"
    where = f", {seen} {failure.stage_and_step}" if failure.stage_and_step else ""
    lines = [f"{failure.ranks_text} on {failure.host} {failure.verb}{first}{where}:"]
    lines += [f"  {frame}" for frame in failure.frames]
    return "\n".join([*([failure.advice] if failure.advice else []), *lines, failure.headline])


def full_report(failure: Failure) -> str:
    """Returns the summary; with details if a failure monitor has detected the failure, since no exception has them."""
    is_whole = failure.is_self_reported or not failure.details
    return summary(failure) if is_whole else f"{summary(failure)}\n\n{failure.details}"


def write_report(directory: str, failure: Failure, rank: int | None, text: str) -> Path | None:
    """Appends a text to this rank's file of the failure report, or to the main process's if ``rank`` is None.

    The ranks share a directory below `failures` in ``directory``, which the time and the job of the failure name. If
    torch records collectives, the text is followed by the last ones of this process. If it records those over ``shm``,
    a second file has them in the form that torch's trace analyzer reads.

    Returns:
        Path of the file; None if it cannot be written, or if a directory or link in its path belongs to another user.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(failure.time))}-{failure.job_id}"
    path = Path(directory, DIRECTORY, name, "main-process.txt" if rank is None else f"rank-{rank}.txt")
    try:
        for parent in (path.parent.parent, path.parent):
            parent.mkdir(mode=0o755, parents=True, exist_ok=True)  # others cannot write to it, whatever the umask is
            if not _is_own(parent):
                return None
        with open(path, "a", opener=_open_own_file) as file:
            file.write(text.rstrip() + "\n")
            if collectives := flight_recorder.recorded_collectives():
                file.write("Last collectives of this process, from torch's flight recorder:\n")
                file.writelines(f"  {each}\n" for each in collectives)
        if rank is not None and (trace := flight_recorder.trace()):
            with open(path.with_name(f"collectives-{rank}"), "wb", opener=_open_own_file) as traced:
                traced.write(trace)
    except OSError:
        return None
    return path


def _is_own(directory: Path) -> bool:
    """Returns whether a directory, and a link to it, belong to this user; others can create both."""
    link, status = os.lstat(directory), os.stat(directory)
    is_own = not hasattr(os, "geteuid") or link.st_uid == status.st_uid == os.geteuid()
    return is_own and stat.S_ISDIR(status.st_mode)


def _open_own_file(path: str, flags: int) -> int:
    """Opens a regular file of this user. No link is followed, and no pipe of another user is waited for.

    Raises:
        OSError: If it is something else.
    """
    fd = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or (hasattr(os, "geteuid") and status.st_uid != os.geteuid()):
        os.close(fd)
        raise OSError(f"{path} is not a regular file of this user")
    return fd


def report_at_exit(
    exception: BaseException,
    failure: Failure,
    rank: int | None,
    directory: str,
    is_reporter: Callable[[], bool] = lambda: True,
) -> None:
    """Prints a short report in place of the exception's traceback, if the script does not catch the exception.

    The rank for which ``is_reporter`` is true prints the whole report; other ranks print one line. The failed rank
    prints a line only under launchers that may terminate the reporter as soon as the rank exits. For ``rank`` and
    ``directory``, see :func:`write_report`.
    """
    # Of exceptions that the script has caught, only the last is kept.
    default_hook: ExceptHook = _replaced.get(sys.excepthook, sys.excepthook)

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not exception:
            default_hook(kind, value, trace)
            return
        _, text = texts_of_exception(value.with_traceback(trace))
        path = write_report(directory, failure, rank, text)
        if path is None:
            default_hook(kind, value, trace)
        if is_reporter():
            more = []
            if rank is not None and rank not in failure.ranks:
                more.append(f"Rank {rank} exited because {failure.ranks_text} {failure.verb}.")
            if path is not None:
                each = f"Report of each rank: {path.parent}{os.sep}rank-*.txt"
                more.append(f"Worker tracebacks: {path}" if rank is None else each)
            print_report(failure, *more)
        elif rank not in failure.ranks:
            print_line(f"rank {rank} exited because {one_line_cause(failure)}")
        elif not _LAUNCHER_VARIABLES.isdisjoint(os.environ):
            print_line(one_line_cause(failure))

    _replaced.clear()
    _replaced[show] = default_hook
    sys.excepthook = show


def print_report(failure: Failure, *more: str) -> None:
    """Prints the summary of a failure, once per failure, and more text, between two rules."""
    text = list(more)
    if (failure.ranks, failure.time) not in _shown:
        _shown.add((failure.ranks, failure.time))
        text.insert(0, f"lightning-strategies-ext: {summary(failure)}")
    if text:
        _print("\n".join([_LINE, *text, _LINE]))


_shown: set[tuple[tuple[int, ...], float]] = set()
#: The installed hook, and the hook before it.
_replaced: dict[ExceptHook, ExceptHook] = {}


def print_line(message: str) -> None:
    """Prints a line to the standard error."""
    _print(f"lightning-strategies-ext: {message}")


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # a launcher that exited first reads the output no more
        # In one write, so that no output of a launcher comes between the text and its final newline.
        print(f"{text}\n", end="", file=sys.stderr, flush=True)  # noqa: T201


def is_collective_error(exception: BaseException) -> bool:
    """Returns whether a collective or a barrier raised an exception."""
    if isinstance(exception, ValueError):  # Horovod raises it after the failure monitor's abort
        return _message(exception).startswith("Horovod has not been initialized")
    if not isinstance(exception, RuntimeError):
        return False
    is_by_class = isinstance(exception, DistBackendError) or isinstance(exception.__cause__, DistBackendError)
    return is_by_class or _COLLECTIVE_ERROR_PATTERN.search(_message(exception)) is not None


def is_peer_loss(exception: BaseException) -> bool:
    """Returns whether a collective's exception says that another rank has exited, which may publish the reason."""
    return _PEER_LOSS_PATTERN.search(_message(exception)) is not None


def _message(exception: BaseException) -> str:
    """Returns the message of an exception without ``__str__``, which may be code of the user and may block."""
    texts = [each for each in exception.args if isinstance(each, str)]
    # Horovod raises exceptions that have another one as their message.
    return " ".join([*texts, *(_message(each) for each in exception.args if isinstance(each, BaseException))])


def advise(exception: BaseException, advice: str) -> None:
    """Puts a line of advice before the message of an exception, once; the failure report begins with it."""
    if advice_of(exception) == "":
        exception.args = (f"{advice}\n{exception.args[0]}", *exception.args[1:])
        vars(exception)[_ADVICE] = advice


def advice_of(exception: BaseException) -> str:
    """The line of advice on an exception; empty if there is none."""
    return str(vars(exception).get(_ADVICE, ""))


# --- ranks that have not called a collective ---


def describe_lone_call(observed: Observation, call_site: str) -> str:
    """Returns sentences with the user's call and what the other ranks did instead; empty if they may have called it."""
    others = _describe_others(observed)
    if not others:
        return ""
    called = f" Rank {observed.rank} has called it at {call_site}." if call_site else ""
    return f"{called} Meanwhile, {others}. Call it on all ranks."


def _describe_others(observed: Observation) -> str:
    """Returns what the other ranks have done instead of calling a collective, as a sentence; empty if it is unknown.

    The observer calls a collective, within its stage or after it.
    """
    own, of_text = observed.own, dict[str, list[int]]()
    for rank, status in observed.statuses.items():
        if rank == observed.rank:
            continue
        if status.state == "exited" or rank in observed.exited_ranks:
            of_text.setdefault("exited", []).append(rank)
        elif status.stage > own.stage:
            of_text.setdefault(f"started the next stage ({status.stage_and_step})", []).append(rank)
        elif status.state == "finished":
            of_text.setdefault("finished the stage", []).append(rank)
    parts = [f"{format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {text}" for text, ranks in of_text.items()]
    return "; ".join(parts)


def advise_on_timeout(exception: BaseException, observed: Observation) -> None:
    """Puts the ranks that have not joined a collective before the message of its timeout. Otherwise a no-op."""
    if _TIMEOUT_PATTERN.search(_message(exception)) and (text := describe_absent(observed)):
        advise(exception, text)


def describe_absent(observed: Observation) -> str:
    """Returns the ranks of the observer's stage that wait in no collective, as sentences; empty without such ranks.

    The observer has waited in a collective until its timeout.
    """
    own = observed.own
    absent = [
        status
        for rank, status in sorted(observed.statuses.items())
        if rank != own.rank
        and (status.state, status.stage) == ("running", own.stage)
        and not status.in_collective_s
        and status.num_started <= own.num_started
    ]
    if not absent:
        return ""
    first, ranks = absent[0], format_ranks(status.rank for status in absent)
    where = first.user_frames[-1] if first.user_frames else first.stage_and_step
    return (
        f"{ranks[0].upper()}{ranks[1:]} {'has' if len(absent) == 1 else 'have'} not joined a collective in which rank"
        f" {own.rank} has waited until its timeout. Rank {first.rank} runs {where}. If this takes longer than the"
        " argument `timeout`, increase the argument."
    )

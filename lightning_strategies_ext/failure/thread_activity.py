"""Whether the thread that trains moves, and where it is, as seen from another thread of its process.

It costs that thread nothing: it is looked at, some times per second. While it waits for the workers of a loader, they
move for it.
"""

import gc
import multiprocessing
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import psutil

#: A thread that computes for this part of the time moves, even if it stays in one call, and so does one that sleeps and
#: wakes up so often per second: it reads or writes. One that looks for something now and then does not.
_BUSY = 0.02
_WAKES_PER_S = 20
#: And one whose process reads or writes so many bytes per second: one call may write a whole checkpoint to a slow disk.
_BYTES_PER_S = 100_000
#: Who is at one place for so long may wait for workers, in seconds.
_WAITS_S = 0.5
_MAX_FRAMES = 60
_PACKAGE = str(Path(__file__).parents[1])
#: Where somebody debugs, the thread waits in one of these modules.
_DEBUGGERS = frozenset({"bdb", "pdb", "cmd", "ipdb", "pudb", "pydevd", "_pydevd_bundle", "debugpy", "remote_pdb"})
#: Files that are no code of the user's: of Python, of installed packages, of this one.
_FRAMEWORK_PATHS = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, _PACKAGE)


class ResourceUsage(NamedTuple):
    """What a thread or a process has done so far.

    Attributes:
        cpu_s: Seconds for which it has computed.
        num_wakes: How often it has woken up.
        num_bytes: That its process has read and written.
        is_running: Whether it computes now, or would if a core were free.
    """

    cpu_s: float = 0.0
    num_wakes: int = 0
    num_bytes: int = 0
    is_running: bool = False

    def exceeds(self, before: "ResourceUsage", elapsed_s: float) -> bool:
        """Whether it has done something since, so many seconds ago."""
        return (
            self.is_running
            or self.cpu_s - before.cpu_s > _BUSY * elapsed_s
            or self.num_wakes - before.num_wakes > _WAKES_PER_S * elapsed_s
            or self.num_bytes - before.num_bytes > _BYTES_PER_S * elapsed_s
        )

    @classmethod
    def of_process(cls, pid: int) -> "ResourceUsage":
        """Those of a process; only the CPU time where /proc does not show it.

        Raises:
            psutil.Error: If it has ended.
            OSError: The same, where /proc does not show it.
        """
        try:
            process = psutil.Process(pid)
        except psutil.Error:
            if sys.platform != "linux":
                raise
            return cls(time.clock_gettime(~pid << 3 | 2))  # the clock of clock_getcpuclockid(3)
        with process.oneshot():
            cpu, is_running = process.cpu_times(), process.status() == psutil.STATUS_RUNNING
            return cls(cpu.user + cpu.system, process.num_ctx_switches().voluntary, _num_bytes_of(process), is_running)


class ThreadActivity:
    """Of one thread.

    Args:
        thread: It.

    Attributes:
        unchanged_s: For how long it has been at the same place, in seconds, as counted by :meth:`sample`.
        idle_s: For how long it has been at the same place and has computed next to nothing, in seconds; a thread that
            gets no core is not idle, nor one that waits for workers of a loader which are not.
        module: The one that it is in, or was when it was looked at.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self._ident = thread.ident or 0
        self._status_file = Path(f"/proc/self/task/{thread.native_id}/status")
        self._stack_position: tuple[tuple[int, int], ...] = ()
        self._counts = ResourceUsage()
        self._worker_usage: dict[int, ResourceUsage] = {}
        self._process: psutil.Process | None = None
        with suppress(psutil.Error):  # where there is no /proc
            self._process = psutil.Process()
        self.unchanged_s = 0.0
        self.idle_s = 0.0
        self.module = ""

    def sample(self, elapsed_s: float, has_moved: bool = False) -> None:
        """Looks at the thread; called some times per second.

        Args:
            elapsed_s: Since the last time. More than the caller meant to wait is not counted, so that a process that
                was stopped does not take the time for its thread's.
            has_moved: Whether the thread has moved since the last sample, even if it is at the same place again.
        """
        frames = self._frames()
        self.module = str(frames[0].f_globals.get("__name__", "")) if frames else ""
        place = tuple((id(frame.f_code), frame.f_lasti) for frame in frames)
        counts = self._count()
        is_still = place == self._stack_position and not has_moved
        is_busy = counts.exceeds(self._counts, elapsed_s)
        if is_still and not is_busy and self.unchanged_s >= _WAITS_S and _is_waiting_for_batch(frames):
            is_busy = self._are_dataloader_workers_busy(elapsed_s)
        self.unchanged_s = self.unchanged_s + elapsed_s if is_still else 0.0
        self.idle_s = self.idle_s + elapsed_s if is_still and not is_busy else 0.0
        self._stack_position, self._counts = place, counts

    @property
    def is_in_debugger(self) -> bool:
        """Whether somebody looks at the thread in a debugger of Python's."""
        return any(frame.f_globals.get("__name__", "").split(".")[0] in _DEBUGGERS for frame in self._frames())

    def stack(self) -> str:
        """Where the thread is, as a trace, the outermost call first."""
        frames = [(frame, frame.f_lineno) for frame in reversed(self._frames())]
        return "".join(traceback.StackSummary.extract(iter(frames)).format())

    def user_frames(self) -> list[str]:
        """Where the thread is in code that is none of a framework's, each as ``file:line in function``."""
        frames = [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in self._frames()]
        return user_code_frames(frames[::-1])

    def _count(self) -> ResourceUsage:
        status: dict[str, str] = {}
        with suppress(OSError):  # where there is no /proc
            status = dict(line.split(":\t", 1) for line in self._status_file.read_text().splitlines() if ":\t" in line)
        num_wakes, is_running = int(status.get("voluntary_ctxt_switches", 0)), status.get("State", "").startswith("R")
        return ResourceUsage(_cpu_seconds(self._ident), num_wakes, _num_bytes_of(self._process), is_running)

    def _are_dataloader_workers_busy(self, elapsed_s: float) -> bool:
        before, now = self._worker_usage, dict[int, ResourceUsage]()
        # `multiprocessing.active_children()` would take note of those that have ended, before torch asks how they did.
        for pid in [worker.pid for worker in list(getattr(multiprocessing.process, "_children", ())) if worker.pid]:
            with suppress(psutil.Error, OSError):
                now[pid] = ResourceUsage.of_process(pid)
        self._worker_usage = now
        return any(pid not in before or counts.exceeds(before[pid], elapsed_s) for pid, counts in now.items())

    def _frames(self) -> list[FrameType]:
        frames: list[FrameType] = []
        with _gc_paused():
            frame = sys._current_frames().get(self._ident)
            while frame is not None and len(frames) < _MAX_FRAMES:
                frames.append(frame)
                frame = frame.f_back
        return frames


def _num_bytes_of(process: psutil.Process | None) -> int:
    if process is not None and hasattr(psutil.Process, "io_counters"):  # not on macOS
        with suppress(psutil.Error, OSError):
            counters = process.io_counters()
            return int(counters.read_bytes + counters.write_bytes)
    return 0


def _is_waiting_for_batch(frames: list[FrameType]) -> bool:
    """Whether a thread waits for a batch: from torch's loaders, or whatever Lightning fetches it from."""
    names = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    return any(
        name.startswith(("torch.utils.data.", "torchdata.")) or name.endswith(".loops.fetchers") for name in names
    )


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Lets no garbage be collected, while this thread looks at the frames of another.

    Python 3.11 makes an object for each frame that is looked at, which may set off a collection; what that calls may
    let the other thread go on, and its frame is gone before the object refers to it: the process crashes. Before 3.11
    frames are objects anyway, and from 3.12 on nothing is collected there.
    """
    if sys.version_info[:2] != (3, 11) or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def user_code_frames(frames: list[tuple[str, int | None, str]]) -> list[str]:
    """Those of some frames that are in code of the user's, or the last if none is, as ``file:line in function``."""
    users = [frame for frame in frames if not _is_internal(frame[0])]
    return [f"{file}:{line} in {function}" for file, line, function in users or frames[-1:]]


def frames_of_exception(exception: BaseException) -> list[tuple[str, int | None, str]]:
    """Where an exception was raised: file, line and function of each frame, the outermost first."""
    return [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(exception.__traceback__)]


def _is_internal(file: str) -> bool:
    return file.startswith("<") or any(file.startswith(beginning) for beginning in _FRAMEWORK_PATHS)


def _cpu_seconds(ident: int) -> float:
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except OSError:
        return 0.0

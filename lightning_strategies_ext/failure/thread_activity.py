"""Thread activity: samples of the training thread, taken by the monitor thread a few times per second.

Sampling costs the training thread nothing. While the training thread waits for DataLoader workers, their activity
counts as its own.
"""

import multiprocessing
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import NamedTuple

import psutil

from lightning_strategies_ext._system.call_sites import call_site_of_thread, frames_of_thread, user_code_frames

#: A thread is active, even within one call, if it computes for this part of the time, or if it wakes up this often per
#: second, because it reads or writes. A thread that polls now and then is idle.
_BUSY = 0.02
_WAKES_PER_S = 20
#: A thread is active if its process reads or writes this many bytes per second: one call may write a whole checkpoint.
_BYTES_PER_S = 100_000
#: Seconds with an unchanged stack after which the activity of DataLoader workers is sampled too.
_WAITS_S = 0.5
#: Modules in which a thread waits during a debugger session.
_DEBUGGERS = frozenset({"bdb", "pdb", "cmd", "ipdb", "pudb", "pydevd", "_pydevd_bundle", "debugpy", "remote_pdb"})
#: Modules of this package with barriers of all ranks.
_COLLECTIVES = ("torch_distributed.collectives", "horovod.collectives")


class ResourceUsage(NamedTuple):
    """Cumulative resource usage of a thread or process.

    Attributes:
        cpu_s: CPU time in seconds.
        num_wakes: Number of voluntary context switches.
        num_bytes: Bytes that the process has read and written.
        is_running: Whether the thread or process computes now, or waits for a core.
    """

    cpu_s: float = 0.0
    num_wakes: int = 0
    num_bytes: int = 0
    is_running: bool = False

    def exceeds(self, before: "ResourceUsage", elapsed_s: float) -> bool:
        """Returns whether there was activity since ``before``, which was sampled ``elapsed_s`` seconds ago."""
        return (
            self.is_running
            or self.cpu_s - before.cpu_s > _BUSY * elapsed_s
            or self.num_wakes - before.num_wakes > _WAKES_PER_S * elapsed_s
            or self.num_bytes - before.num_bytes > _BYTES_PER_S * elapsed_s
        )

    @classmethod
    def of_process(cls, pid: int) -> "ResourceUsage":
        """Returns the usage of a process; only its CPU time if /proc does not show the process.

        Raises:
            psutil.Error, OSError: If the process has exited.
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
    """Samples the CPU use and the stack of one thread.

    Attributes:
        unchanged_s: Seconds for which the stack has not changed, as counted by :meth:`sample`.
        idle_s: Seconds for which the stack has not changed and the thread was idle. A thread that waits for a core, or
            for busy DataLoader workers, is not idle.
        module: Module of the innermost frame in the last sample.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self._ident = thread.ident or 0
        self._status_file = Path(f"/proc/self/task/{thread.native_id}/status")
        self._stack_position: tuple[tuple[int, int], ...] = ()
        self._counts = ResourceUsage()
        self._worker_usage: dict[int, ResourceUsage] = {}
        self._process: psutil.Process | None = None
        with suppress(psutil.Error):  # /proc is missing
            self._process = psutil.Process()
        self.unchanged_s = 0.0
        self.idle_s = 0.0
        self.module = ""

    def sample(self, elapsed_s: float, has_moved: bool = False) -> None:
        """Takes a sample, ``elapsed_s`` seconds after the last one, without time in which the process was suspended.

        With ``has_moved``, the thread counts as active even if its stack is the same.
        """
        frames = self._frames()
        self.module = _module_of(frames[0]) if frames else ""
        position = tuple((id(frame.f_code), frame.f_lasti) for frame in frames)
        counts = self._count()
        is_still = position == self._stack_position and not has_moved
        is_busy = counts.exceeds(self._counts, elapsed_s)
        if is_still and not is_busy and self.unchanged_s >= _WAITS_S and _is_waiting_for_batch(frames):
            is_busy = self._are_dataloader_workers_busy(elapsed_s)
        self.unchanged_s = self.unchanged_s + elapsed_s if is_still else 0.0
        self.idle_s = self.idle_s + elapsed_s if is_still and not is_busy else 0.0
        self._stack_position, self._counts = position, counts

    @property
    def is_in_debugger(self) -> bool:
        """Whether the thread is in a Python debugger."""
        return any(_module_of(frame).split(".")[0] in _DEBUGGERS for frame in self._frames())

    def stack(self) -> str:
        """Returns the stack of the thread as text, outermost call first."""
        frames = [(frame, frame.f_lineno) for frame in reversed(self._frames())]
        return "".join(StackSummary.extract(iter(frames)).format())

    def user_frames(self) -> list[str]:
        """Returns the frames of the user's code, each as ``file:line in function``."""
        codes = [(frame.f_code, frame.f_lineno) for frame in reversed(self._frames())]
        return user_code_frames([FrameSummary(c.co_filename, line, c.co_name, lookup_line=False) for c, line in codes])

    def call_site(self) -> str:
        """Returns the innermost call of the user's code, see :func:`.call_sites.call_site`."""
        return call_site_of_thread(self._ident)

    def barrier_call(self) -> int | None:
        """Returns a number that identifies the call of a barrier of all ranks in which the thread is, or None."""
        for frame in self._frames():
            if frame.f_code.co_name == "barrier" and _module_of(frame).endswith(_COLLECTIVES):
                return id(frame)
        return None

    def _count(self) -> ResourceUsage:
        status: dict[str, str] = {}
        with suppress(OSError):  # /proc is missing
            status = dict(line.split(":\t", 1) for line in self._status_file.read_text().splitlines() if ":\t" in line)
        num_wakes, is_running = int(status.get("voluntary_ctxt_switches", 0)), status.get("State", "").startswith("R")
        cpu_s = 0.0
        with suppress(OSError, AttributeError):  # the thread has exited, or the system has no such clock
            cpu_s = time.clock_gettime(time.pthread_getcpuclockid(self._ident))
        return ResourceUsage(cpu_s, num_wakes, _num_bytes_of(self._process), is_running)

    def _are_dataloader_workers_busy(self, elapsed_s: float) -> bool:
        before, now = self._worker_usage, dict[int, ResourceUsage]()
        # `multiprocessing.active_children()` would reap workers that have exited, before torch reads their exit codes.
        for pid in [worker.pid for worker in list(getattr(multiprocessing.process, "_children", ())) if worker.pid]:
            with suppress(psutil.Error, OSError):
                now[pid] = ResourceUsage.of_process(pid)
        self._worker_usage = now
        return any(pid not in before or counts.exceeds(before[pid], elapsed_s) for pid, counts in now.items())

    def _frames(self) -> list[FrameType]:
        return frames_of_thread(self._ident)


def _num_bytes_of(process: psutil.Process | None) -> int:
    if process is not None and hasattr(psutil.Process, "io_counters"):  # not on macOS
        with suppress(psutil.Error, OSError):
            counters = process.io_counters()
            return int(counters.read_bytes + counters.write_bytes)
    return 0


def _is_waiting_for_batch(frames: list[FrameType]) -> bool:
    """Returns whether a thread waits for a batch of a torch DataLoader or of Lightning's data fetcher."""
    return any(
        name.startswith(("torch.utils.data.", "torchdata.")) or name.endswith(".loops.fetchers")
        for name in map(_module_of, frames)
    )


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))

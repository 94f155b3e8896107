"""Call sites: where in the user's code a thread is, read from its stack."""

import gc
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import FrameSummary
from types import CodeType, FrameType
from typing import Final

MAX_FRAMES: Final = 60
#: Paths of files without user code begin so: generated code, Python, installed packages, and this package.
_FRAMEWORK_PATHS: Final = (
    "<",
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(__file__).parents[1]),
)
#: Functions through which a user's call passes before the function that the user has called.
_WRAPPERS: Final = ("wrapper", "wrapped", "inner", "__call__", "_wrapped_call_impl", "_call_impl", "decorate_context")


def frames_of_thread(ident: int, max_frames: int = MAX_FRAMES) -> list[FrameType]:
    """Returns the frames of a thread, the innermost first, and pauses garbage collection meanwhile if necessary.

    Python 3.11 creates an object for each frame that is read. That may start a collection, whose callbacks may let
    the other thread run; its frame is then freed before the object refers to it, and the process crashes. Before
    3.11, frames are objects anyway; since 3.12, no collection starts there.
    """
    frames: list[FrameType] = []
    must_pause = sys.version_info[:2] == (3, 11) and gc.isenabled()
    if must_pause:
        gc.disable()
    try:
        frame = sys._current_frames().get(ident)
        while frame is not None and len(frames) < max_frames:
            frames.append(frame)
            frame = frame.f_back
    finally:
        if must_pause:
            gc.enable()
    return frames


def user_code_frames(frames: Sequence[FrameSummary]) -> list[str]:
    """Returns those of the given frames that are user code, or else the last frame, as ``file:line in function``."""
    users = [frame for frame in frames if is_user_code(frame.filename)]
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in users or frames[-1:]]


def is_user_code(path: str) -> bool:
    """Returns whether a file contains the user's code: no generated code, Python, installed package, or this one."""
    return not path.startswith(_FRAMEWORK_PATHS)


def call_site(positions: Iterable[tuple[CodeType, int]]) -> str:
    """Returns the user's innermost call, such as "`fit` in main (train.py:40)"; empty without user code.

    Args:
        positions: Code and line of each frame of a thread, the innermost first.
    """
    called = ""
    for code, line in positions:
        if is_user_code(code.co_filename):
            caller = f"{code.co_name} ({code.co_filename}:{line})"
            return f"`{called}` in {caller}" if called else caller
        if code.co_name not in _WRAPPERS and not code.co_name.startswith("<"):
            called = code.co_name
    return ""


def call_site_of_thread(ident: int) -> str:
    """Returns the user's innermost call in a thread."""
    return call_site((frame.f_code, frame.f_lineno) for frame in frames_of_thread(ident, 10 * MAX_FRAMES))


def call_site_of_exception(exception: BaseException) -> str:
    """Returns the user's innermost call from which an exception was raised, as far as its traceback has the frames."""
    positions = [(frame.f_code, line) for frame, line in traceback.walk_tb(exception.__traceback__)]
    return call_site(reversed(positions))


def call_site_of_process() -> str:
    """Returns the call site of the current thread, or of the main thread if the current thread has none."""
    idents = threading.get_ident(), threading.main_thread().ident or 0
    return next(filter(None, map(call_site_of_thread, idents)), "")

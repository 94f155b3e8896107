"""The end of a process whose training thread does not end it, or not with the exit code that it should have."""

import atexit
import logging
import multiprocessing
import os
import sys
from contextlib import suppress
from typing import NoReturn

#: The exit code of a process that its watch has ended.
ENDED = 70

_must_fail = False


def end_process(exit_code: int = ENDED) -> NoReturn:
    """Ends this process from any of its threads, with what multiprocessing has started in it: workers of loaders, say.

    Args:
        exit_code: Of the process.
    """
    _flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(exit_code)


def fail_at_exit() -> None:
    """Lets this process end with exit code 1, whatever the script ends with; called at its exit, or before."""
    global _must_fail
    _must_fail = True


@atexit.register  # early, and so it is called late
def _fail_if_asked_to() -> None:
    if _must_fail:
        logging.shutdown()
        _flush()
        os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()

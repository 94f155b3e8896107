"""The end of a process whose training thread does not end it."""

import multiprocessing
import os
import sys
from contextlib import suppress
from typing import NoReturn

#: The exit code of a process that its watch has ended.
ENDED = 70


def end_process(exit_code: int = ENDED) -> NoReturn:
    """Ends this process from any of its threads, with what multiprocessing has started in it: workers of loaders, say.

    Args:
        exit_code: Of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(exit_code)

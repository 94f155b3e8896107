"""What a script ends with between two stages of the Trainer: the other ranks would wait for it in the next one."""

import sys
from types import TracebackType
from typing import Any

from lightning_strategies_ext.failure import watch

_usual: Any = None


def announce_uncaught() -> None:
    """Lets the others know of an exception that this script does not catch; a second call does nothing more.

    In a stage the strategy says it, and worker processes have no script: their job does.
    """
    global _usual
    if _usual is None:
        _usual, sys.excepthook = sys.excepthook, _announce


def _announce(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    global _usual
    sys.excepthook, _usual = _usual, None
    own = watch.of_process()
    if own is not None and not isinstance(value, KeyboardInterrupt):  # it reaches all
        own.announce_uncaught(value)
    sys.excepthook(kind, value, trace)

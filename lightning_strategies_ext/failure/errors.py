"""Recognizes exceptions of collectives, for which engines have no common class; and adds advice to exceptions."""

import re

from torch.distributed import DistBackendError

#: Messages of collective errors that are no DistBackendErrors: from gloo and Horovod, and errors that passed C++.
_COLLECTIVE_ERROR_PATTERN = re.compile(
    "gloo|Connection (closed|reset)|DistBackendError|PeerLostError|Horovod|has (ended|left)"
)
_ADVICE = "_lightning_strategies_ext_advice"
_PEER_LOSS_PATTERN = re.compile("Connection|Horovod|has (ended|left|failed)|[Ss]hut ?down|reset by peer")


def is_collective_error(exception: BaseException) -> bool:
    """Returns whether a collective or a barrier raised an exception."""
    if isinstance(exception, ValueError):  # Horovod raises it after the failure monitor's abort
        return str(exception).startswith("Horovod has not been initialized")
    if not isinstance(exception, RuntimeError):
        return False
    is_by_class = isinstance(exception, DistBackendError) or isinstance(exception.__cause__, DistBackendError)
    return is_by_class or _COLLECTIVE_ERROR_PATTERN.search(str(exception)) is not None


def is_peer_loss(exception: BaseException) -> bool:
    """Returns whether a collective's exception says that another rank has exited, which may publish the reason."""
    return _PEER_LOSS_PATTERN.search(str(exception)) is not None


def advise(exception: BaseException, advice: str) -> None:
    """Puts a line of advice before the message of an exception; the failure report begins with it. Once per exception.

    Args:
        exception: An exception with a message.
        advice: What the user can do, in one line.
    """
    if advice_of(exception) == "":
        exception.args = (f"{advice}\n{exception.args[0]}", *exception.args[1:])
        vars(exception)[_ADVICE] = advice


def advice_of(exception: BaseException) -> str:
    """The line of advice on an exception; empty if there is none."""
    return str(vars(exception).get(_ADVICE, ""))

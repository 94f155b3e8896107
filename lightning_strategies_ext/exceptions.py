"""What this package raises and users may want to catch: when workers fail, torch.multiprocessing's errors, as stock."""

from typing import TYPE_CHECKING

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

if TYPE_CHECKING:
    from lightning_strategies_ext.failure.rank_status import Failure


class UnevenInputsError(RuntimeError):
    """Ranks have different numbers of batches, and nobody said what to do then."""


class DifferentModelsError(ValueError):
    """The ranks do not have the same model; the message says where it differs first. Raised on every rank."""


class RankFailedError(RuntimeError):
    """Another rank failed, and this one ended for it; the message says which, where and why.

    Attributes:
        is_stuck: Whether the other did not come to a collective, and is ended since it does not end by itself.
    """

    def __init__(self, message: str, is_stuck: bool = False) -> None:
        super().__init__(message)
        self.is_stuck = is_stuck


class WorldTooSmallError(RuntimeError):
    """Fewer ranks are left than elastic training may have; the message says where the state is."""


class JoinError(RuntimeError):
    """A rank cannot restore the commit of the ranks that it joins; the message names the first difference."""


class WorkerRaisedError(ProcessRaisedException):
    """A worker raised an exception; ``__cause__`` is that exception where it could be sent.

    An exception that all workers raise, of the same class and with the same message, is raised unchanged, and its
    ``__cause__`` is this error.

    Attributes:
        error_index: The local rank of the worker.
        error_pid: Its process id.
        first_failure: What failed first, as the ranks know it: which, where, at which step; None if they had not met.
    """

    first_failure: "Failure | None" = None

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg, error_index, error_pid)
        self.error_pid = error_pid  # torch 2.5 to 2.7 declare it and set ``pid`` instead


class WorkerDiedError(ProcessExitedException):
    """A worker ended in the middle of its work: killed, out of memory, crashed.

    Attributes:
        error_index: The local rank of the worker.
        error_pid: Its process id.
        exit_code: Its exit code, negative for a signal; -1 where it is not known.
        first_failure: See :class:`WorkerRaisedError`.
    """

    first_failure: "Failure | None" = None

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(msg, error_index, error_pid, exit_code, signal_name)
        self.error_pid = error_pid


class ResultsError(RuntimeError):
    """``fit`` has run, and not all that came of it could be brought back; the message says where it is saved."""

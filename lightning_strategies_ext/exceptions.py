"""Public exceptions. Worker errors derive from torch.multiprocessing's exceptions, which Lightning raises."""

from typing import TYPE_CHECKING

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lightning_strategies_ext.renamed import RenamedAttribute

if TYPE_CHECKING:
    from lightning_strategies_ext.failure.rank_status import Failure


class UnevenInputsError(RuntimeError):
    """The ranks have different numbers of batches, with ``uneven_inputs="error"``."""


class ModelMismatchError(ValueError):
    """The ranks have different models; the message contains the first difference. Raised on every rank."""


class RankDisagreementError(RuntimeError):
    """The ranks have different values of what must be equal; the message contains the values. Raised on every rank."""


class NonfiniteLossError(RuntimeError):
    """The loss of a rank is NaN or infinite; the message names the rank, the batch, and the module. On every rank."""


class LoggedKeysError(ValueError):
    """The ranks log different keys with ``sync_dist=True``; the message names the keys, the ranks, and the lines.

    Raised on every rank.
    """


class RankFailedError(RuntimeError):
    """Another rank has failed, so this rank stops; the message contains the rank, its step, and the reason.

    Attributes:
        is_hang: Whether the other rank hangs, so that it has to be killed.
    """

    is_stuck = RenamedAttribute("is_hang")

    def __init__(self, message: str, is_hang: bool = False) -> None:
        super().__init__(message)
        self.is_hang = is_hang


class TooFewRanksError(RuntimeError):
    """A rank cannot join the next world, because too few ranks remain or the service that assigns ranks has ended.

    The message contains the path of the saved state, if there is a state.
    """


class JoinError(RuntimeError):
    """A rank cannot restore the commit of the ranks that it joins; the message names the first difference."""


class WorkerRaisedError(ProcessRaisedException):
    """A worker has raised an exception; ``__cause__`` is this exception if it could be pickled.

    If all workers raise exceptions of the same class with the same message, the exception is raised unchanged, with
    this error as its ``__cause__``.

    Attributes:
        error_index: Local rank of the worker.
        error_pid: Process id of the worker.
        first_failure: First failure that the ranks observed; None if the ranks had not connected.
    """

    first_failure: "Failure | None" = None

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg, error_index, error_pid)
        self.error_pid = error_pid  # torch 2.5 to 2.7 declare it and set ``pid`` instead


class WorkerDiedError(ProcessExitedException):
    """A worker has exited during a task: killed, out of memory, or crashed.

    Attributes:
        error_index: Local rank of the worker.
        error_pid: Process id of the worker.
        exit_code: Exit code of the worker, negative for a signal; -1 if unknown.
        first_failure: First failure that the ranks observed; None if the ranks had not connected.
    """

    first_failure: "Failure | None" = None

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(msg, error_index, error_pid, exit_code, signal_name)
        self.error_pid = error_pid


class ResultTransferError(RuntimeError):
    """``fit`` has finished, but its results could not be transferred; the message contains the path of the state."""

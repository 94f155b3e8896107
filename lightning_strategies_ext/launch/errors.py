"""What the main process raises when a worker fails. Both are torch.multiprocessing's, as the stock strategies raise."""

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException


class WorkerRaisedError(ProcessRaisedException):
    """A worker raised an exception; ``__cause__`` is that exception where it could be sent.

    Attributes:
        error_index: The local rank of the worker.
        error_pid: Its process id.
    """


class WorkerDiedError(ProcessExitedException):
    """A worker ended in the middle of its work: killed, out of memory, crashed.

    Attributes:
        error_index: The local rank of the worker.
        error_pid: Its process id.
        exit_code: Its exit code, negative for a signal; -1 where it is not known.
    """

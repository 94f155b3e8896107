"""Times at which the gradient exchanges of a model in DDP begin and end, from DDP's built-in timers.

The timers need no communication hook and no autograd hook. DDP's reducer records when the first bucket is handed over,
when the backward pass has computed the last gradient, and when the last bucket is complete, in every step or in every
n-th step. This works for any exchange of buckets, and for a model that other code has wrapped. It costs some ten
microseconds in a step that is recorded.

Gradients that are exchanged without the reducer (:mod:`.direct_exchange`) have separate times.

A bucket that is exchanged over ``shm`` blocks the backward pass for a while, or until the exchange is complete. This
time counts as a wait for the exchange, not as hidden behind the backward pass, and is moved to the end of the backward
pass.

On GPUs, the times come from CUDA events in the stream of the backward pass, relative to the time at which the CPU has
started the first bucket. To read them, the CPU waits for that backward pass. It does not wait in other steps.
"""

import threading

from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext.shm import blocking_times
from lightning_strategies_ext.torch_distributed.direct_exchange import DirectExchange, gradient_bytes
from lightning_strategies_ext.torch_distributed.distributed_model import DistributedModel

_SAMPLING_OFF = 1 << 30


class DDPExchangeTimer:
    """Times of a model in DDP; implements :class:`lightning_strategies_ext.monitoring.step_recorder.ExchangeTimer`.

    Args:
        model: Model in DDP.

    Attributes:
        num_bytes: Bytes of the gradients of one step.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._iteration = 0
        self.num_bytes = gradient_bytes(model)

    @property
    def num_buckets(self) -> int:
        """Number of buckets into which DDP has put the gradients; 0 if DDP exchanges none."""
        if self._direct is not None:
            return 0
        return int(self._model._get_ddp_logging_data().get("num_buckets_reduced", 0))

    @property
    def _direct(self) -> DirectExchange | None:
        model = self._model
        if not isinstance(model, DistributedModel) or not model.is_exchanged_directly:
            return None
        return model.direct_exchange

    def set_recording(self, is_on: bool) -> None:
        """Starts or stops recording times, from the next step on."""
        # A private name of torch since 1.8, as is its logger (read in torch 2.5 to 2.13).
        self._model._set_ddp_runtime_logging_sample_rate(1 if is_on else _SAMPLING_OFF)
        blocking_times.set_recording(is_on)
        if self._direct is not None:
            self._direct.records_times = is_on

    def on_ddp_rebuilt(self, is_on: bool) -> None:
        """Continues after DDP was initialized again, with or without recording times."""
        self._iteration = 0
        self.num_bytes = gradient_bytes(self._model)
        self.set_recording(is_on)

    def last_exchange(self) -> tuple[int, int, int] | None:
        """Returns the times of the exchange of the last step.

        Returns:
            Times at which the exchange began, at which only the exchange remained, and at which it ended, as
            ``time.time_ns()`` counts; None if no exchange was recorded.
        """
        direct = self._direct
        if direct is not None:
            times, direct.times = direct.times, None
            return times
        logger = self._model.logger
        if logger is None:
            return None
        logger.set_runtime_stats_and_log()  # the next forward pass would do this
        calls = blocking_times.drain()
        numbers = logger._get_ddp_logging_data().ints_map
        iteration, begin = numbers.get("iteration", 0), numbers.get("backward_comm_time_start", 0)
        if iteration == self._iteration or begin <= 0:
            return None
        self._iteration = iteration
        duration = numbers.get("backward_comm_time", 0)
        if duration <= 0:
            return None
        computed = begin + numbers.get("backward_compute_comm_overlap_time", 0)
        thread_id = threading.get_ident()
        blocked_ns = sum(
            max(0, min(call.end_ns, computed) - max(call.begin_ns, begin)) for call in calls if call.thread == thread_id
        )
        return begin, computed - blocked_ns, begin + duration

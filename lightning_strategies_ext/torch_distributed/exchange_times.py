"""When the exchanges of a model in DDP begin and end, by torch's own clocks, which DDP has built in.

Nothing is put in the way of a gradient: no communication hook, no hook of autograd. DDP's reducer notes when the first
bucket is handed over, when the backward pass has computed the last gradient, and when the last bucket is there, in
every step or in one of so many; whatever exchanges the buckets, and whoever has wrapped the model. That costs some ten
microseconds in a step in which it is on.

Gradients that are exchanged without the reducer (:mod:`.direct_exchange`) have times of their own.

A bucket that is exchanged over ``shm`` holds up the backward pass for a while, or until it is there: that counts as
waiting for it, and not as hidden behind the backward pass, and is laid at its end.

On GPUs the times are those of CUDA events in the stream of the backward pass, laid from when the CPU has begun the
first bucket. To read them, the CPU waits for that backward pass; in steps that are not observed it waits for nothing.
"""

import threading

from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext.shm import call_times
from lightning_strategies_ext.torch_distributed.bucket_search import gradient_bytes
from lightning_strategies_ext.torch_distributed.direct_exchange import DirectExchange
from lightning_strategies_ext.torch_distributed.distributed_model import DistributedModel

_NEVER = 1 << 30


class DDPTimes:
    """See :class:`lightning_strategies_ext.monitoring.session.Timekeeper`.

    Args:
        model: In DDP.

    Attributes:
        num_bytes: Of the gradients of one step.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._iteration = 0
        self.num_bytes = gradient_bytes(model)

    @property
    def num_buckets(self) -> int:
        """Into how many buckets DDP has put the gradients; 0 if it exchanges none."""
        if self._direct is not None:
            return 0
        return int(self._model._get_ddp_logging_data().get("num_buckets_reduced", 0))

    @property
    def _direct(self) -> DirectExchange | None:
        model = self._model
        if not isinstance(model, DistributedModel) or not model.is_exchanged_directly:
            return None
        return model.direct_exchange

    def observe(self, is_on: bool) -> None:
        """Begins or ends to take the times of steps, from the next one on."""
        # A private name of torch's since 1.8, as is its logger; read in torch 2.5 to 2.13.
        self._model._set_ddp_runtime_logging_sample_rate(1 if is_on else _NEVER)
        call_times.take(is_on)
        if self._direct is not None:
            self._direct.takes_times = is_on

    def follow(self, is_on: bool) -> None:
        """Goes on after DDP has been made anew, taking times or not."""
        self._iteration = 0
        self.num_bytes = gradient_bytes(self._model)
        self.observe(is_on)

    def last(self) -> tuple[int, int, int] | None:
        """When the exchange of the step that is over began, was all ready, and ended; None if there was none."""
        direct = self._direct
        if direct is not None:
            times, direct.times = direct.times, None
            return times
        logger = self._model.logger
        if logger is None:
            return None
        logger.set_runtime_stats_and_log()  # which the next forward pass would do
        calls = call_times.taken()
        numbers = logger._get_ddp_logging_data().ints_map
        iteration, begin = numbers.get("iteration", 0), numbers.get("backward_comm_time_start", 0)
        if iteration == self._iteration or begin <= 0:
            return None
        self._iteration = iteration
        duration = numbers.get("backward_comm_time", 0)
        if duration <= 0:
            return None
        computed = begin + numbers.get("backward_compute_comm_overlap_time", 0)
        here = threading.get_ident()
        held_up = sum(
            max(0, min(call.end_ns, computed) - max(call.begin_ns, begin)) for call in calls if call.thread == here
        )
        return begin, computed - held_up, begin + duration

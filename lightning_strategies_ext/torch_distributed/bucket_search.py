"""Search for DDP's bucket size during training: each size is used for some steps, then the fastest for the rest.

DDP exchanges gradients in buckets while the backward pass computes further gradients. The exchange of small buckets
begins early, but each bucket adds a latency. Large buckets are fewer, but the backward pass ends with a wait for the
last one. The best size depends on the model, the network, and the backend, so it is measured in the training itself: in
backward passes that exchange gradients, on all ranks. Each size has two turns, so that a machine that slows down
meanwhile does not bias the result.

All ranks count the steps with such passes, so they change sizes in the same step without communication. At the end, one
all-reduce averages their times. A size does not change gradients except, with three or more ranks, the rounding of
their last bit: backends add the parts of a bucket in different orders.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self, override

from lightning_strategies_ext.torch_distributed.direct_exchange import gradient_bytes
from lightning_strategies_ext.torch_distributed.feature import Feature, FeatureContext
from lightning_strategies_ext.torch_distributed.wrapping import AUTO, NOT_REWRAPPABLE

#: Sizes that are tried in addition to DDP's own, in mebibytes. Sizes above the first that fits all gradients into one
#: bucket are not tried.
SIZES_MB = (1.0, 4.0, 16.0, 64.0, 256.0)
NUM_REPEATS = 2
#: Number of passes of each turn that are not measured, in which DDP arranges its buckets, and number of measured
#: passes.
NUM_WARMUP = 3
NUM_MEASURED = 5
#: Fraction of the time by which a size must be faster than DDP's own size to be chosen.
MIN_GAIN = 0.03


class BucketSearch:
    """Bucket-size search of one training. Collective: all ranks create it together, for the same model.

    Args:
        num_bytes: Bytes of all gradients that are exchanged.
        device: Device of the model. On a GPU, the search synchronizes the passes that it measures, and no others.

    Attributes:
        caps: Sizes to try, in mebibytes; None for DDP's own size. If it has a single size, there is nothing to try.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.caps = caps_for(num_bytes)
        self._device = device
        self._seconds: dict[float | None, list[float]] = {cap: [] for cap in self.caps}
        self._remaining_caps = list(self.caps) * NUM_REPEATS if len(self.caps) > 1 else []
        self._num_steps = 0
        self._begin: float | None = None
        self._step_s = 0.0
        self._has_exchanged = False

    @property
    def cap(self) -> float | None:
        """Size of the current turn, in mebibytes; None for DDP's own size, and when the search is over."""
        return self._remaining_caps[0] if self._remaining_caps else None

    @property
    def is_over(self) -> bool:
        """Whether each size has had its turns."""
        return not self._remaining_caps

    @property
    def num_remaining_steps(self) -> int:
        """Number of steps with an exchange that the search still needs."""
        return len(self._remaining_caps) * (NUM_WARMUP + NUM_MEASURED) - self._num_steps

    def begin_pass(self) -> None:
        """Starts to measure a backward pass. Called before the pass."""
        self._begin = self._now()

    def end_pass(self, has_exchanged: bool) -> None:
        """Adds the time of a backward pass to its step. Called after the pass.

        Args:
            has_exchanged: Whether gradients were exchanged in the pass.
        """
        if has_exchanged and self._begin is not None:
            self._step_s += self._now() - self._begin
            self._has_exchanged = True
        self._begin = None

    def end_step(self) -> bool:
        """Ends a step, which may have had several backward passes, or none. Called between two steps.

        Returns:
            Whether a turn is over, so that the next step needs another size.
        """
        if not self._has_exchanged:
            return False
        if self._is_measuring:
            self._seconds[self.cap].append(self._step_s)
        self._step_s, self._has_exchanged = 0.0, False
        self._num_steps += 1
        if self._num_steps < NUM_WARMUP + NUM_MEASURED:
            return False
        self._num_steps = 0
        del self._remaining_caps[0]
        return True

    def choose(self, mean_over_ranks: Callable[[Tensor], Tensor]) -> "BucketChoice":
        """Returns the result when the search is over. Collective: all ranks call it.

        Args:
            mean_over_ranks: Callable that averages a float64 tensor of shape ``(number of sizes,)`` over all ranks.
        """
        times = torch.tensor([median(self._seconds[cap]) for cap in self.caps], dtype=torch.float64)
        return BucketChoice(dict(zip(self.caps, mean_over_ranks(times.to(self._device)).tolist(), strict=True)))

    @property
    def _is_measuring(self) -> bool:
        return self._num_steps >= NUM_WARMUP

    def _now(self) -> float:
        if self._is_measuring and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class BucketChoice:
    """Result of a bucket-size search.

    Args:
        seconds: Seconds of a backward pass, by size in mebibytes; None for DDP's own size.

    Attributes:
        seconds: Seconds of a backward pass, by size in mebibytes; None for DDP's own size.
        cap: Fastest size, in mebibytes; None for DDP's own size, unless another size is faster by :data:`MIN_GAIN`.
    """

    def __init__(self, seconds: Mapping[float | None, float]) -> None:
        self.seconds = seconds
        fastest = min(seconds, key=seconds.__getitem__)
        self.cap = fastest if seconds[fastest] < (1 - MIN_GAIN) * seconds[None] else None

    def __str__(self) -> str:
        others = ", ".join(
            f"{1e3 * seconds:.3g} ms with {format_cap(cap)}" for cap, seconds in self.seconds.items() if cap != self.cap
        )
        return (
            f"set to {format_cap(self.cap)}. A backward pass with its exchange takes {1e3 * self.seconds[self.cap]:.3g}"
            f" ms, compared with {others}"
        )


def caps_for(num_bytes: int) -> Sequence[float | None]:
    """Returns the sizes that make a difference, DDP's own first; only DDP's own if one bucket always suffices.

    Args:
        num_bytes: Bytes of all gradients that are exchanged.
    """
    smaller = [size for size in SIZES_MB if size * 2**20 < num_bytes]
    single_bucket = [size for size in SIZES_MB if size * 2**20 >= num_bytes][:1]
    return [None, *smaller, *single_bucket] if smaller else [None]


def format_cap(cap: float | None) -> str:
    """Returns the text for a size in messages."""
    return "DDP's default sizes (25 MiB, first bucket 1 MiB)" if cap is None else f"bucket_cap_mb={cap:g}"


def pop_auto(ddp_kwargs: dict[str, Any], **others: Any) -> bool:
    """Removes ``bucket_cap_mb="auto"`` from DDP's arguments; returns whether it was set.

    Args:
        ddp_kwargs: Arguments of DistributedDataParallel.
        **others: Other arguments that prevent a search, with their values. The value of an argument that is not set is
            None; that of ``uneven_inputs`` is "error".

    Raises:
        ValueError: If a search is requested, and another argument prevents it or hides its result.
    """
    if ddp_kwargs.get("bucket_cap_mb") != AUTO:
        return False
    given = {**others, **{name: ddp_kwargs.get(name) for name in NOT_REWRAPPABLE}}
    for name, value in given.items():
        if value is not None and (name, value) != ("uneven_inputs", "error"):
            where = ", which elastic training sets" if name == "uneven_inputs" else ""
            raise ValueError(
                f"`bucket_cap_mb={AUTO!r}` tries buckets of several sizes during training, which cannot be combined"
                f" with `{name}={value!r}`{where}. Omit that argument, or pass a size in mebibytes."
            )
    del ddp_kwargs["bucket_cap_mb"]
    return True


_REQUEST = f"`bucket_cap_mb={AUTO!r}`"


class BucketTuning(Feature):
    """``bucket_cap_mb="auto"``: rebuilds DDP between steps, with other bucket sizes.

    Args:
        context: The parts of the strategy that the feature uses.
    """

    def __init__(self, context: FeatureContext) -> None:
        self._context = context
        self._model: DistributedDataParallel | None = None
        self._search: BucketSearch | None = None
        self._is_rebuilding = False

    @classmethod
    def create(cls, context: FeatureContext) -> Self | None:
        """Returns the feature, or None if it is not in use."""
        return cls(context) if context.options.tunes_buckets and context.collectives.world_size() > 1 else None

    @override
    def wrap(self, model: DistributedDataParallel) -> None:
        """Starts the search for a model with DDP's own buckets."""
        search = BucketSearch(gradient_bytes(model), self._context.device)
        if search.is_over:
            rank_zero_info(f"{_REQUEST}: all gradients fit into the smallest bucket, so there is no size to choose.")
        else:
            self._model, self._search = model, search

    @override
    def before_step(self) -> None:
        search = self._search
        if search is None:
            return
        if self._context.ddp_kwargs.get("bucket_cap_mb") != search.cap:  # the search has started again
            self._use(search.cap)
        if not search.end_step():
            return
        cap = search.cap
        if search.is_over:
            self._search = None
            choice = search.choose(lambda times: self._context.collectives.reduce(times, reduce_op="mean"))
            rank_zero_info(f"{_REQUEST}: {choice}.")
            cap = choice.cap
        self._use(cap)

    @override
    def before_backward(self, loss: Tensor) -> None:
        if self._search is not None:
            self._search.begin_pass()

    @override
    def after_backward(self) -> None:
        if self._search is not None:
            assert self._model is not None
            self._search.end_pass(self._model.require_backward_grad_sync)

    @override
    def after_rebuild(self, model: DistributedDataParallel) -> None:
        """Starts again if other parameters are trained: the exchange of their gradients takes a different time."""
        if self._search is not None and not self._is_rebuilding:
            self._model = self._search = None
            self.wrap(model)

    @override
    def close(self) -> None:
        """Ends an unfinished search."""
        if self._search is not None:
            num_steps = self._search.num_remaining_steps
            rank_zero_info(f"{_REQUEST}: no size was chosen, because the search requires {num_steps} more steps.")
        self._model = self._search = None

    def _use(self, cap: float | None) -> None:
        """Rebuilds DDP with a bucket size in MiB, or with DDP's own if None. Collective: all ranks call it."""
        assert self._model is not None
        self._context.ddp_kwargs.pop("bucket_cap_mb", None)
        if cap is not None:
            self._context.ddp_kwargs["bucket_cap_mb"] = cap
        self._is_rebuilding = True
        self._context.rebuild(self._model)
        self._is_rebuilding = False

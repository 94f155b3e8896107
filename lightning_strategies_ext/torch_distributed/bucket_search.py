"""The size of DDP's buckets by trial: a training tries several in turn, for some steps each, and keeps the fastest.

DDP exchanges gradients by the bucket while the backward pass computes the next. Small buckets begin early and pay a
latency each; large ones are fewer, and the last of them is waited for. Which is best depends on the model, the network
and the backend, so it is measured where it matters: in backward passes that exchange, on all ranks. Each size has two
turns, so that a machine which becomes slower meanwhile does not decide.

Ranks count the steps with such passes, and so change together without a word; in the end they average their times, in
one all-reduce. A size changes no gradient but, with three or more ranks, in the rounding of its last bit:
backends add up parts of a bucket in different orders.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext.torch_distributed.direct_exchange import trained_parameters
from lightning_strategies_ext.torch_distributed.wrapping import ONCE_ONLY

#: What is asked for by name.
AUTO = "auto"
#: Sizes that are tried beside DDP's own, in mebibytes; the largest that makes a difference is one bucket for all.
SIZES_MB = (1.0, 4.0, 16.0, 64.0, 256.0)
NUM_TURNS = 2
#: Of each turn: passes that are not measured, in which DDP puts its buckets in order, and those that are.
NUM_SETTLING = 3
NUM_MEASURED = 5
#: How much faster than DDP's own a size must be to be chosen, as a share of the time.
LEAST_GAIN = 0.03


class BucketSearch:
    """One training's. All ranks create theirs together, for the same model.

    Args:
        num_bytes: Of all gradients that are exchanged.
        device: Of the model. On a GPU, passes that are measured are waited for; no others.

    Attributes:
        caps: The sizes that are tried, in mebibytes; None for DDP's own. With a single one there is nothing to try.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.caps = caps_for(num_bytes)
        self._device = device
        self._seconds: dict[float | None, list[float]] = {cap: [] for cap in self.caps}
        self._turns = list(self.caps) * NUM_TURNS if len(self.caps) > 1 else []
        self._num_steps = 0
        self._begin: float | None = None
        self._of_step = 0.0
        self._has_exchanged = False

    @property
    def cap(self) -> float | None:
        """The size whose turn it is; DDP's own when all is over."""
        return self._turns[0] if self._turns else None

    @property
    def is_over(self) -> bool:
        """Whether each size has had its turns."""
        return not self._turns

    @property
    def num_steps_left(self) -> int:
        """Steps with an exchange that are still needed."""
        return len(self._turns) * (NUM_SETTLING + NUM_MEASURED) - self._num_steps

    def begin_pass(self) -> None:
        """Called before a backward pass."""
        self._begin = self._now()

    def end_pass(self, has_exchanged: bool) -> None:
        """Called after a backward pass.

        Args:
            has_exchanged: Whether gradients were exchanged in it.
        """
        if has_exchanged and self._begin is not None:
            self._of_step += self._now() - self._begin
            self._has_exchanged = True
        self._begin = None

    def end_step(self) -> bool:
        """Called between two steps, of which the first may have had several backward passes, or none.

        Returns:
            Whether a turn is over, and another size is to be had from the next step on.
        """
        if not self._has_exchanged:
            return False
        if self._is_measuring:
            self._seconds[self.cap].append(self._of_step)
        self._of_step, self._has_exchanged = 0.0, False
        self._num_steps += 1
        if self._num_steps < NUM_SETTLING + NUM_MEASURED:
            return False
        self._num_steps = 0
        del self._turns[0]
        return True

    def choose(self, mean_over_ranks: Callable[[Tensor], Tensor]) -> "BucketChoice":
        """What was found out; called by all ranks together when it is over.

        Args:
            mean_over_ranks: Averages a float64 tensor of shape ``(number of sizes,)`` over all ranks.
        """
        times = torch.tensor([median(self._seconds[cap]) for cap in self.caps], dtype=torch.float64)
        return BucketChoice(dict(zip(self.caps, mean_over_ranks(times.to(self._device)).tolist(), strict=True)))

    @property
    def _is_measuring(self) -> bool:
        return self._num_steps >= NUM_SETTLING

    def _now(self) -> float:
        if self._is_measuring and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class BucketChoice:
    """The size that was chosen.

    Args:
        seconds: Of a backward pass, by size in mebibytes; None for DDP's own.

    Attributes:
        seconds: See above.
        cap: The fastest, in mebibytes; None for DDP's own, unless another is faster by :data:`LEAST_GAIN`.
    """

    def __init__(self, seconds: Mapping[float | None, float]) -> None:
        self.seconds = seconds
        fastest = min(seconds, key=seconds.__getitem__)
        self.cap = fastest if seconds[fastest] < (1 - LEAST_GAIN) * seconds[None] else None

    def __str__(self) -> str:
        others = ", ".join(
            f"{1e3 * seconds:.3g} ms with {in_words(cap)}" for cap, seconds in self.seconds.items() if cap != self.cap
        )
        return (
            f"it is {in_words(self.cap)} from now on. A backward pass with its exchange takes"
            f" {1e3 * self.seconds[self.cap]:.3g} ms so, and {others}"
        )


def caps_for(num_bytes: int) -> Sequence[float | None]:
    """The sizes that make a difference, DDP's own first; only that one if all gradients are one bucket of each.

    Args:
        num_bytes: Of all gradients that are exchanged.
    """
    smaller = [size for size in SIZES_MB if size * 2**20 < num_bytes]
    whole = [size for size in SIZES_MB if size * 2**20 >= num_bytes][:1]
    return [None, *smaller, *whole] if smaller else [None]


def in_words(cap: float | None) -> str:
    """A size, for people."""
    return "DDP's own sizes (25 MiB, the first 1 MiB)" if cap is None else f"bucket_cap_mb={cap:g}"


def gradient_bytes(model: DistributedDataParallel) -> int:
    """Of all gradients that a model in DDP exchanges in a step."""
    return sum(parameter.nbytes for parameter in trained_parameters(model).values())


def check_can_search(ddp_kwargs: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuses to try sizes of buckets where that cannot be right, or could not be seen.

    Args:
        ddp_kwargs: Arguments of DistributedDataParallel.
        others: Arguments that would have to be left out, with their values, if they were given.

    Raises:
        ValueError: If one was given.
    """
    given = {**others, **{name: ddp_kwargs.get(name) for name in ONCE_ONLY}}
    for name, value in given.items():
        if value is not None:
            where = ", as elastic training has it" if name == "uneven_inputs" else ""
            raise ValueError(
                f"`bucket_cap_mb={AUTO!r}` tries buckets of several sizes while it trains, which cannot be with"
                f" `{name}={value!r}`{where}. Leave that out, or give a size in mebibytes."
            )

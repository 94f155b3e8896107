"""Records of one rank over a window of steps, and their serialization."""

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

#: A training batch. Times are values of ``time.time_ns()``. ``step`` counts optimizer steps, each of one or more
#: batches. ``previous_end`` is 0 after an interruption, such as a validation. ``backward_begin`` is 0 without a
#: backward pass. ``backward`` is the total duration of the batch's backward passes, in nanoseconds.
BATCH = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("step", "previous_end", "fetch", "begin", "backward_begin", "backward_end", "end"),
            "backward",
        )
    ]
)
#: An exchange, see :class:`.observer.ExchangeObserver`; ``kind`` is one of the following three values.
EXCHANGE = np.dtype([(name, np.int64) for name in ("step", "begin", "ready", "end", "kind")])
#: Gradient exchange that is awaited within the backward pass; the recorded ones represent all steps.
IN_BACKWARD = 0
#: Gradient exchange that is awaited after the backward pass.
AFTER_BACKWARD = 1
#: Exchange of models, after optimizer steps; all are recorded.
MODEL_EXCHANGE = 2
#: Number of first steps of a training, which allocate and compile, and are excluded from means.
NUM_WARMUP_STEPS = 2


@dataclass(frozen=True)
class Window:
    """Records of consecutive steps of one rank.

    Attributes:
        rank: Global rank.
        host: Identity of its host; ranks of one host share a clock.
        number: Number of the window, from 0.
        num_steps: Number of optimizer steps.
        num_bytes: Number of bytes that this rank has contributed to exchanges in these steps.
        batches: Batches of observed steps, of dtype :data:`BATCH`.
        exchanges: Exchanges, of dtype :data:`EXCHANGE`.
    """

    rank: int
    host: str
    number: int
    num_steps: int
    num_bytes: int
    batches: NDArray[Any]
    exchanges: NDArray[Any]

    _IN_HEADER: ClassVar = ("rank", "host", "number", "num_steps", "num_bytes")

    def dump(self) -> bytes:
        """Returns the window as bytes."""
        header = {name: getattr(self, name) for name in self._IN_HEADER} | {"num_batches": len(self.batches)}
        return json.dumps(header).encode() + b"\n" + self.batches.tobytes() + self.exchanges.tobytes()

    @classmethod
    def load(cls, data: bytes) -> Self:
        """Returns the window that :meth:`dump` has serialized."""
        first, _, rest = data.partition(b"\n")
        header = json.loads(first)
        num_bytes = header.pop("num_batches") * BATCH.itemsize
        batches, exchanges = np.frombuffer(rest[:num_bytes], BATCH), np.frombuffer(rest[num_bytes:], EXCHANGE)
        return cls(**header, batches=batches, exchanges=exchanges)

    def observed(self, max_steps: int) -> Self:
        """Returns the window reduced to its last consecutive observed steps, up to a maximum number."""
        steps = np.unique(self.batches["step"])[-max_steps:]
        if not len(steps):
            return replace(self, exchanges=self.exchanges[:0])
        gaps = np.flatnonzero(np.diff(steps) > 1)
        first = steps[gaps[-1] + 1] if len(gaps) else steps[0]
        is_selected = (self.exchanges["step"] >= first) & (self.exchanges["step"] <= steps[-1])
        return replace(self, batches=self.batches[self.batches["step"] >= first], exchanges=self.exchanges[is_selected])

"""What one rank has noted of some steps, and how it travels."""

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

#: A training batch. Times are of ``time.time_ns()``; ``step`` counts optimizer steps, to which several batches may
#: belong; ``previous_end`` is 0 where something else came between, such as a validation; ``backward_begin`` is 0 where
#: there was no backward pass, and ``backward`` is how long all of them took, in nanoseconds.
BATCH = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("step", "previous_end", "fetch", "begin", "backward_begin", "backward_end", "end"),
            "backward",
        )
    ]
)
#: An exchange, see :class:`.observer.ExchangeObserver`; ``kind`` is one of the three below.
EXCHANGE = np.dtype([(name, np.int64) for name in ("step", "begin", "ready", "end", "kind")])
#: Of gradients, waited for within the backward pass; those of some steps stand for all.
IN_BACKWARD = 0
#: Of gradients, waited for after the backward pass.
AFTER_BACKWARD = 1
#: Of models, after optimizer steps; all of them are noted.
OF_MODELS = 2
#: The first steps of a training allocate and compile, and say nothing about the others.
NUM_WARMUP_STEPS = 2


@dataclass(frozen=True)
class Window:
    """Consecutive steps of one rank.

    Attributes:
        rank: Global rank.
        host: Identity of its host; ranks of a host have one clock.
        number: Windows before this one.
        num_steps: Optimizer steps.
        num_bytes: What this rank has handed to exchanges in them.
        batches: Those of observed steps; of dtype :data:`BATCH`.
        exchanges: Of dtype :data:`EXCHANGE`.
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
        """All of it as bytes."""
        header = {name: getattr(self, name) for name in self._IN_HEADER} | {"num_batches": len(self.batches)}
        return json.dumps(header).encode() + b"\n" + self.batches.tobytes() + self.exchanges.tobytes()

    @classmethod
    def load(cls, data: bytes) -> Self:
        """What :meth:`dump` was of."""
        first, _, rest = data.partition(b"\n")
        header = json.loads(first)
        num_bytes = header.pop("num_batches") * BATCH.itemsize
        batches, exchanges = np.frombuffer(rest[:num_bytes], BATCH), np.frombuffer(rest[num_bytes:], EXCHANGE)
        return cls(**header, batches=batches, exchanges=exchanges)

    def observed(self, most: int) -> Self:
        """Only the steps that were observed last in a row, so many at most."""
        steps = np.unique(self.batches["step"])[-most:]
        if not len(steps):
            return replace(self, exchanges=self.exchanges[:0])
        gaps = np.flatnonzero(np.diff(steps) > 1)
        first = steps[gaps[-1] + 1] if len(gaps) else steps[0]
        is_kept = (self.exchanges["step"] >= first) & (self.exchanges["step"] <= steps[-1])
        return replace(self, batches=self.batches[self.batches["step"] >= first], exchanges=self.exchanges[is_kept])

"""Exchange log: batches whose gradients one rank has exchanged, for engines that cannot compare them in the exchange.

The training thread records the number of each batch whose gradients it has exchanged. The failure monitor publishes a
summary in the rank's status: how many exchanges, a digest of their batches, and the last batches in a short form. A
rank that has made as many exchanges as another rank, or more, compares the digest with its own for that number. A
skipped backward pass is therefore detected soon after it, not prevented. The number of a batch is negative if the rank
has exchanged zeros, because the backward pass has reached no parameter.
"""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

#: Number of exchanges whose batches and digests a rank keeps.
HISTORY: Final = 65_536
#: Number of runs in a summary.
_MAX_RUNS: Final = 8
_PRIME: Final = 1_099_511_628_211
_MODULUS: Final = (1 << 61) - 1
ADVICE: Final = (
    "A rank has left out a backward pass, or has run one more than the others, and the weights are wrong since then."
    " Run the same backward passes for each batch on every rank; a loss of zero, such as `0 * output.sum()`, keeps the"
    " ranks together"
)


@dataclass(frozen=True)
class ExchangeSummary:
    """What a rank publishes about its gradient exchanges in a stage.

    Attributes:
        stage: Number of stages that the rank has begun.
        count: Number of exchanges.
        digest: Digest of the batches of all exchanges.
        runs: The last exchanges, as runs of (number of the first exchange, its batch, difference of two batches, number
            of exchanges).
    """

    stage: int
    count: int
    digest: int
    runs: tuple[tuple[int, int, int, int], ...]


class ExchangeLog:
    """Gradient exchanges of this rank in one stage.

    Attributes:
        record: Records the number of a batch, counted from 1, after its gradients were exchanged; negative for zeros.
    """

    def __init__(self) -> None:
        self._new: deque[int] = deque()
        self.record = self._new.append  # a function of C, because the training thread calls it in each step
        self._lock = threading.Lock()
        self._count = self._digest = 0
        self._batches: deque[int] = deque(maxlen=HISTORY)
        self._digests: deque[int] = deque([0], maxlen=HISTORY + 1)  # one more, for zero exchanges
        self._runs: deque[list[int]] = deque(maxlen=_MAX_RUNS)

    def summary(self, stage: int) -> ExchangeSummary:
        """Returns what the rank publishes."""
        with self._lock:
            self._process_new()
            runs = tuple((start, batch, step, length) for start, batch, step, length in self._runs)
            return ExchangeSummary(stage, self._count, self._digest, runs)

    def first_difference(self, other: ExchangeSummary) -> tuple[int, int, int] | None:
        """Returns the first exchange in which another rank differs, with the batches of this rank and of the other.

        The exchange is the first that is known: earlier ones may differ, too. The result is None if the exchanges are
        equal, or if this rank has made fewer than the other.
        """
        with self._lock:
            self._process_new()
            first = self._count - len(self._batches)
            if not first <= other.count <= self._count or self._digests[other.count - first] == other.digest:
                return None
            for start, batch, step, length in other.runs:
                for index in range(max(start, first), start + length):
                    other_batch = batch + step * (index - start)
                    if self._batches[index - first] != other_batch:
                        return index, self._batches[index - first] - 1, other_batch - 1
            return first, -1, -1

    def _process_new(self) -> None:
        while self._new:
            batch = self._new.popleft()
            run = self._runs[-1] if self._runs else None
            if run is not None and run[3] == 1:
                run[2:] = batch - run[1], 2
            elif run is not None and batch == run[1] + run[2] * run[3]:
                run[3] += 1
            else:
                self._runs.append([self._count, batch, 0, 1])
            self._count += 1
            self._digest = (self._digest * _PRIME + batch) % _MODULUS
            self._batches.append(batch)
            self._digests.append(self._digest)


def describe_difference(rank: int, other_rank: int, difference: tuple[int, int, int]) -> str:
    """Returns the first difference between the exchanges of two ranks as a sentence, with advice."""
    index, own, other = difference
    texts = {rank: own, other_rank: other}
    (first, first_batch), (second, second_batch) = sorted(texts.items())
    of_first, of_second = _describe(first_batch), _describe(second_batch)
    if first_batch >= 0 and second_batch >= 0:
        of_second = f"of batch {second_batch}"
    difference_text = (
        f"in gradient exchange {index}, rank {first} exchanged {of_first}, and rank {second} {of_second}"
        if -1 not in (own, other)
        else f"rank {first} and rank {second} exchanged gradients of different batches"
    )
    return f"{difference_text}. {ADVICE}"


def _describe(batch: int) -> str:
    """Returns what a rank has exchanged, by the number of a batch in a difference: counted from 0, or below -1."""
    return f"gradients of batch {batch}" if batch >= 0 else f"zeros, because batch {-batch - 2} has no gradients there"

"""Distinguishes weights of parts of the batch from weights of the whole batch, in the numbers that replicas pass.

A user may pass ``batch_size=len(x)`` or ``batch_size=32``. While all parts have the same size, the difference is
irrelevant: the weight of a batch is the sum of the replicas' numbers, and means over batches depend only on ratios of
weights. The difference matters if sizes differ: a constant is equal for parts of different sizes, and for a batch with
fewer parts. The numbers passed so far at a call site of a step show which case applies.

Limitations: The case is unknown until the numbers show it. A warning is logged if a number is ambiguous and the case
matters, or if an earlier decision was wrong.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from lightning.pytorch.utilities.rank_zero import rank_zero_warn


@dataclass
class CallSite:
    """Statistics of the numbers that steps have passed at one call site.

    Attributes:
        number: First number.
        size: Number of samples in the part of the first number.
        batch_size: Number of samples in the whole batch of the first number.
        is_constant: Whether all numbers have been equal.
        is_in_proportion: Whether all numbers have been proportional to the number of samples of the part.
        is_in_proportion_to_batch: Whether all numbers have been proportional to the number of samples of the batch.
        has_differed: Whether the numbers of one batch have differed.
        has_been_equal: Whether the numbers of one batch have been equal for parts of different sizes.
        answer: Last decision that mattered: whether the numbers belong to the whole batch; None before.
        has_warned: Whether a warning has been logged.
    """

    number: float
    size: int
    batch_size: int
    is_constant: bool = True
    is_in_proportion: bool = True
    is_in_proportion_to_batch: bool = True
    has_differed: bool = False
    has_been_equal: bool = False
    answer: bool | None = None
    has_warned: bool = False

    def observe(self, numbers: Sequence[float], sizes: Sequence[int], batch_size: int) -> None:
        """Updates the statistics with the replicas' numbers for a batch."""
        for number, size in zip(numbers, sizes, strict=True):
            self.is_constant &= number == self.number
            self.is_in_proportion &= math.isclose(number * self.size, self.number * size, rel_tol=1e-5)
            self.is_in_proportion_to_batch &= math.isclose(
                number * self.batch_size, self.number * batch_size, rel_tol=1e-5
            )
        is_equal = len(set(numbers)) == 1
        self.has_differed |= not is_equal
        self.has_been_equal |= is_equal and len(set(sizes)) > 1

    def warn(self, text: str) -> None:
        """Logs a warning, at most once."""
        if not self.has_warned:
            self.has_warned = True
            rank_zero_warn(text)


class NumberScopes:
    """Distinguishes numbers of parts of the batch from numbers of the whole batch.

    Args:
        num_replicas: Number of replicas; batches with fewer samples use fewer.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._call_sites: dict[Hashable, CallSite] = {}
        self._has_warned_of_loss = False

    def are_batch_weights(
        self, key: Hashable, name: str, weights: Sequence[float], sizes: Sequence[int], all_sizes: Sequence[int]
    ) -> bool:
        """Returns whether weights belong to the whole batch, not to its parts.

        Args:
            key: Identifier of the call site.
            name: Name of the call site in messages.
            weights: Weights that replicas have passed.
            sizes: Number of samples of each of these replicas.
            all_sizes: Number of samples of each replica, including replicas that have passed no weight.
        """
        site = self._observed(key, weights, sizes, sum(all_sizes))
        is_equal, is_small = len(set(weights)) == 1, len(all_sizes) < self.num_replicas
        may_be_of_batch = site.is_constant or site.is_in_proportion_to_batch
        is_certain = site.has_differed or site.has_been_equal or may_be_of_batch or site.is_in_proportion
        if site.has_differed or site.has_been_equal:
            answer = not site.has_differed
        else:
            answer = may_be_of_batch and not site.is_in_proportion
        if site.answer not in (None, answer):
            site.warn(
                f"{name} was given weights that were treated as weights of the"
                f" {'whole batch, because they were equal' if site.answer else 'parts of the batch'}, but they are"
                f" weights {'of the whole batch' if answer else 'of its parts'}. Results of earlier batches are"
                f" slightly wrong. {_WAY_OUT}"
            )
        if is_equal and (len(set(sizes)) > 1 or is_small):
            site.answer = answer
            if not is_certain and is_small:
                site.warn(
                    f"{name} is given weights that change from batch to batch, and this batch has fewer samples than"
                    " replicas. Whether they are weights of the batch or of each replica's part is not known: they"
                    f" are treated as weights of the parts. {_WAY_OUT}"
                )
        return answer

    def is_settled(self, key: Hashable) -> bool:
        """Returns whether sums at this call site need no further checks."""
        site = self._call_sites.get(key)
        return site is not None and (site.has_differed or site.has_warned)

    def warn_if_added_repeatedly(
        self, key: Hashable, name: str, numbers: Sequence[float], sizes: Sequence[int], are_computed: bool
    ) -> None:
        """Warns if replicas have passed equal numbers to a sum that are not counts of their samples.

        Args:
            key: Identifier of the call site.
            name: Name of the call site in messages.
            numbers: Numbers that replicas have passed.
            sizes: Number of samples of each replica.
            are_computed: Whether the numbers are results of a computation, which can be equal by chance.
        """
        site = self._observed(key, numbers, sizes, sum(sizes))
        if len(sizes) < 2 or site.has_differed or not numbers[0]:
            return
        is_count = all(size and number % size == 0 for number, size in zip(numbers, sizes, strict=True))
        if site.has_been_equal or (site.is_constant and not site.is_in_proportion) or not (is_count or are_computed):
            site.warn(
                f"{name} is given {numbers[0]:g} by each of {len(sizes)} replicas, and adds that up to"
                f" {sum(numbers):g}. That is correct for a count per part of the batch, but too large for a count per"
                " batch. Count per batch in `on_train_batch_end` or a similar hook, which receives the whole batch."
            )

    def warn_of_loss(self, counts: Sequence[float], sizes: Sequence[int]) -> None:
        """Warns, at most once, that losses are weighted by samples, although a step has passed other numbers.

        Args:
            counts: Numbers that replicas have passed.
            sizes: Number of samples of each replica.
        """
        if not self._has_warned_of_loss:
            self._has_warned_of_loss = True
            listed, samples = (", ".join(f"{number:g}" for number in numbers) for numbers in (counts, sizes))
            rank_zero_warn(
                f"The step logs with `batch_size` {listed} in parts of {samples} samples, and the last operation of"
                " its loss does not show over what the loss is a mean. The loss of each part is weighted by its"
                " number of samples, so a mean over tokens, or with class weights, differs from that of one device."
                " Give the strategy a function `scatter` that returns the number of tokens of each part as its number"
                " of samples, or compute the loss by one of torch's losses, `x.mean()`, or `x.sum() / count`."
            )

    def _observed(self, key: Hashable, numbers: Sequence[float], sizes: Sequence[int], batch_size: int) -> CallSite:
        site = self._call_sites.setdefault(key, CallSite(numbers[0], sizes[0], batch_size))
        site.observe(numbers, sizes, batch_size)
        return site


_WAY_OUT = (
    "Give it the number of samples (`len(x)`), a tensor with a row per sample, or update it in `on_train_batch_end`"
    " or a similar hook, which receives the whole batch."
)

"""Decides whether numbers that replicas pass to ``self.log`` or a metric belong to their parts or to the whole batch.

In ``self.log``, a user may pass ``batch_size=len(x)``, the weight of a part, or ``batch_size=32``, the weight of the
batch. While all parts have the same size, the difference is irrelevant: the weight of a batch is the sum of the
replicas' numbers, and means over batches depend only on ratios of weights. The difference matters if sizes differ: a
constant is equal for parts of different sizes, and for a batch with fewer parts. The numbers that steps have passed so
far at one call site show which case applies.

Limitations: The case is unknown until the numbers show it. A warning is logged if a number is ambiguous and the case
matters, or if an earlier decision was wrong.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_ADVICE = (
    "Pass the number of samples as the weight (`len(x)`), or a tensor with a row per sample, or make the call in"
    " `on_train_batch_end` or a similar hook, which receives the whole batch."
)


@dataclass
class CallSite:
    """Statistics of the numbers that steps have passed at one call site.

    Attributes:
        first_number: First number.
        first_size: Number of samples in the part of the first number.
        first_batch_size: Number of samples in the whole batch of the first number.
        is_constant: Whether all numbers have been equal.
        is_proportional_to_part: Whether all numbers have been proportional to the number of samples of the part.
        is_proportional_to_batch: Whether all numbers have been proportional to the number of samples of the batch.
        has_differed: Whether the numbers of one batch have differed.
        is_equal_for_unequal_parts: Whether the numbers of one batch have been equal for parts of different sizes.
        decision: Whether the numbers belonged to the whole batch, when that last changed a result; None before.
        has_warned: Whether a warning has been logged.
    """

    first_number: float
    first_size: int
    first_batch_size: int
    is_constant: bool = True
    is_proportional_to_part: bool = True
    is_proportional_to_batch: bool = True
    has_differed: bool = False
    is_equal_for_unequal_parts: bool = False
    decision: bool | None = None
    has_warned: bool = False

    def observe(self, numbers: Sequence[float], sizes: Sequence[int], batch_size: int) -> None:
        """Updates the statistics with the replicas' numbers for a batch."""
        for number, size in zip(numbers, sizes, strict=True):
            self.is_constant &= number == self.first_number
            self.is_proportional_to_part &= math.isclose(
                number * self.first_size, self.first_number * size, rel_tol=1e-5
            )
            self.is_proportional_to_batch &= math.isclose(
                number * self.first_batch_size, self.first_number * batch_size, rel_tol=1e-5
            )
        is_equal = len(set(numbers)) == 1
        self.has_differed |= not is_equal
        self.is_equal_for_unequal_parts |= is_equal and len(set(sizes)) > 1

    def warn(self, text: str) -> None:
        """Logs a warning, at most once."""
        if not self.has_warned:
            self.has_warned = True
            rank_zero_warn(text)


class NumberScopes:
    """Scopes of numbers, part or whole batch, by the call sites that have passed them.

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
        site = self._observe(key, weights, sizes, sum(all_sizes))
        is_small_batch = len(all_sizes) < self.num_replicas
        has_evidence = site.has_differed or site.is_equal_for_unequal_parts
        may_be_of_batch = site.is_constant or site.is_proportional_to_batch
        is_probable = may_be_of_batch and not site.is_proportional_to_part
        decision = not site.has_differed if has_evidence else is_probable
        if site.decision not in (None, decision):
            site.warn(
                f"{name} was given weights that were treated as weights of the"
                f" {'whole batch, because they were equal' if site.decision else 'parts of the batch'}, but they are"
                f" weights {'of the whole batch' if decision else 'of its parts'}. Results of earlier batches are"
                f" slightly wrong. {_ADVICE}"
            )
        if len(set(weights)) == 1 and (len(set(sizes)) > 1 or is_small_batch):  # the decision changes the result
            site.decision = decision
            is_certain = has_evidence or may_be_of_batch or site.is_proportional_to_part
            if not is_certain and is_small_batch:
                site.warn(
                    f"{name} is given weights that change from batch to batch, and this batch has fewer samples than"
                    " replicas. Whether they are weights of the batch or of each replica's part is not known: they"
                    f" are treated as weights of the parts. {_ADVICE}"
                )
        return decision

    def has_checked_sums(self, key: Hashable) -> bool:
        """Returns whether :meth:`warn_if_added_repeatedly` need not be called again for a call site."""
        site = self._call_sites.get(key)
        return site is not None and (site.has_differed or site.has_warned)

    def warn_if_added_repeatedly(
        self, key: Hashable, name: str, numbers: Sequence[float], sizes: Sequence[int], are_computed: bool
    ) -> None:
        """Warns if replicas have passed equal numbers to a sum, and the numbers are not counts of their samples.

        Such a number probably belongs to the whole batch, for example ``SumMetric.update(1)`` as a count of batches.

        Args:
            key: Identifier of the call site.
            name: Name of the call site in messages.
            numbers: Numbers that replicas have passed.
            sizes: Number of samples of each replica.
            are_computed: Whether the numbers are results of a computation, which can be equal by chance.
        """
        site = self._observe(key, numbers, sizes, sum(sizes))
        if len(sizes) < 2 or site.has_differed or not numbers[0]:
            return
        is_count = all(size and number % size == 0 for number, size in zip(numbers, sizes, strict=True))
        is_of_batch = site.is_equal_for_unequal_parts or (site.is_constant and not site.is_proportional_to_part)
        if is_of_batch or not (is_count or are_computed):
            site.warn(
                f"{name} is given {numbers[0]:g} by each of {len(sizes)} replicas, and adds them to {sum(numbers):g}."
                " The sum is correct for a count per part of the batch, but too large for a count per batch. Count per"
                " batch in `on_train_batch_end` or a similar hook, which receives the whole batch."
            )

    def warn_of_loss(self, batch_sizes: Sequence[float], sizes: Sequence[int]) -> None:
        """Warns, at most once, that losses are weighted by samples, although ``self.log`` has other batch sizes.

        Args:
            batch_sizes: Values of ``self.log(batch_size=...)`` in the replicas.
            sizes: Number of samples of each replica.
        """
        if not self._has_warned_of_loss:
            self._has_warned_of_loss = True
            listed, samples = (", ".join(f"{number:g}" for number in numbers) for numbers in (batch_sizes, sizes))
            rank_zero_warn(
                f"The step logs with `batch_size` {listed} in parts of {samples} samples, and the last operation of"
                " its loss does not show the denominator of the mean. The loss of each part is weighted by its number"
                " of samples, so a mean over tokens, or with class weights, differs from the mean on one device."
                " Give the strategy a function `scatter` that returns the number of tokens of each part as its number"
                " of samples, or compute the loss by one of torch's losses, `x.mean()`, or `x.sum() / count`."
            )

    def _observe(self, key: Hashable, numbers: Sequence[float], sizes: Sequence[int], batch_size: int) -> CallSite:
        site = self._call_sites.setdefault(key, CallSite(numbers[0], sizes[0], batch_size))
        site.observe(numbers, sizes, batch_size)
        return site

"""What replicas say by the numbers that they give: how much their parts of the batch count, or how much the batch does.

``batch_size=len(x)`` and ``batch_size=32`` are both numbers, and while parts have one size they come to the same: each
replica's number counts, so a batch counts the constant times the number of replicas, and means over batches ask only
for ratios. They come apart where sizes do: a constant is then the same for parts that differ, and for a batch that has
fewer parts. What a place in a step has given so far tells which it is.

What it does not promise: to know before something has told. Where a number may be either and it matters, or where an
answer turns out to have been wrong, it warns.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from lightning.pytorch.utilities.rank_zero import rank_zero_warn


@dataclass
class Place:
    """What is known of the numbers that steps have given at one place.

    Attributes:
        number: The first.
        size: The number of samples that it was given for.
        batch_size: The number of samples of the whole batch.
        is_constant: Whether all have been the same.
        is_in_proportion: Whether all have been in proportion to the number of samples.
        is_in_proportion_to_batch: Whether all have been in proportion to the number of samples of the whole batch.
        has_differed: Whether those of one batch have been different.
        has_been_equal: Whether those of one batch have been equal for parts of different sizes.
        answer: What was last made of numbers for which it mattered; None before.
        has_warned: Whether there has been a warning.
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

    def look(self, numbers: Sequence[float], sizes: Sequence[int], batch_size: int) -> None:
        """Takes in what replicas have given for a batch."""
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
        """Warns, once."""
        if not self.has_warned:
            self.has_warned = True
            rank_zero_warn(text)


class GivenNumbers:
    """Tells numbers that are of parts of the batch from numbers that are of the whole of it.

    Args:
        num_replicas: How many there are, if the batch is large enough.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._places: dict[Hashable, Place] = {}
        self._has_warned_of_loss = False

    def are_of_batch(
        self, key: Hashable, name: str, weights: Sequence[float], sizes: Sequence[int], all_sizes: Sequence[int]
    ) -> bool:
        """Whether weights are how much the batch counts, and not how much each part does.

        Args:
            key: The place in the step.
            name: What a user calls it.
            weights: What replicas have given.
            sizes: How many samples each of these has.
            all_sizes: The same for all replicas, if some have given nothing.
        """
        place = self._looked_at(key, weights, sizes, sum(all_sizes))
        is_equal, is_small = len(set(weights)) == 1, len(all_sizes) < self.num_replicas
        may_be_of_batch = place.is_constant or place.is_in_proportion_to_batch
        is_certain = place.has_differed or place.has_been_equal or may_be_of_batch or place.is_in_proportion
        if place.has_differed or place.has_been_equal:
            answer = not place.has_differed
        else:
            answer = may_be_of_batch and not place.is_in_proportion
        if place.answer not in (None, answer):
            place.warn(
                f"{name} was given weights that this strategy took for those of the"
                f" {'whole batch, since they were equal' if place.answer else 'parts of the batch'}, and"
                f" now they turn out to be {'of the whole batch' if answer else 'of its parts'}. What was made of"
                f" earlier batches is slightly off. {_WAY_OUT}"
            )
        if is_equal and (len(set(sizes)) > 1 or is_small):
            place.answer = answer
            if not is_certain and is_small:
                place.warn(
                    f"{name} is given weights that change from batch to batch, and now a batch with fewer samples than"
                    " replicas. Nothing tells whether they are those of the batch or of each replica's part of it:"
                    f" they are taken for those of parts. {_WAY_OUT}"
                )
        return answer

    def is_settled(self, key: Hashable) -> bool:
        """Whether numbers that are added up at this place need not be looked at again."""
        place = self._places.get(key)
        return place is not None and (place.has_differed or place.has_warned)

    def warn_if_added_repeatedly(
        self, key: Hashable, name: str, numbers: Sequence[float], sizes: Sequence[int], are_computed: bool
    ) -> None:
        """Warns if replicas have given the same number to be added up, and it is no count of their samples.

        Args:
            key: The place in the step.
            name: What a user calls it.
            numbers: What replicas have given.
            sizes: How many samples each has.
            are_computed: Whether they look like the results of a computation, which can be equal by chance.
        """
        place = self._looked_at(key, numbers, sizes, sum(sizes))
        if len(sizes) < 2 or place.has_differed or not numbers[0]:
            return
        is_count = all(size and number % size == 0 for number, size in zip(numbers, sizes, strict=True))
        if place.has_been_equal or (place.is_constant and not place.is_in_proportion) or not (is_count or are_computed):
            place.warn(
                f"{name} is given {numbers[0]:g} by each of {len(sizes)} replicas, and adds that up to"
                f" {sum(numbers):g}. That is right for what each counts in its part of the batch, and too much for what"
                " counts once per batch. Count that in `on_train_batch_end` or the like, which sees the whole batch."
            )

    def warn_of_loss(self, counts: Sequence[float], sizes: Sequence[int]) -> None:
        """Warns, once, that losses of replicas count by their samples, although a step has given other numbers.

        Args:
            counts: The numbers.
            sizes: How many samples each replica has.
        """
        if not self._has_warned_of_loss:
            self._has_warned_of_loss = True
            listed, samples = (", ".join(f"{number:g}" for number in numbers) for numbers in (counts, sizes))
            rank_zero_warn(
                f"The step logs with `batch_size` {listed} in parts of {samples} samples, and the last operation of its"
                " loss does not tell what the loss is a mean over. The loss of each part counts by its samples, so that"
                " a mean over tokens, or with class weights, differs from that of one device. Give the strategy a"
                " function `scatter` that returns the number of tokens of each part as its number of samples, or"
                " compute the loss by one of torch's losses, `x.mean()`, or `x.sum() / count`."
            )

    def _looked_at(self, key: Hashable, numbers: Sequence[float], sizes: Sequence[int], batch_size: int) -> Place:
        place = self._places.setdefault(key, Place(numbers[0], sizes[0], batch_size))
        place.look(numbers, sizes, batch_size)
        return place


_WAY_OUT = (
    "Give it the number of samples (`len(x)`), a tensor with a row per sample, or update it in `on_train_batch_end` or"
    " the like, which sees the whole batch."
)

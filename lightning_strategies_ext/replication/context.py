"""What a replica knows of its place among the others, and how it hands over what must happen once for the whole batch.

A replica either waits for it (:meth:`ReplicaContext.meet`), or notes it down for later (:meth:`ReplicaContext.note`),
which costs nothing and which not all replicas need to do.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device

from lightning_strategies_ext.replication.given_numbers import GivenNumbers
from lightning_strategies_ext.replication.lockstep import Lockstep, Seat

#: Carries out something for the whole batch, given what each replica has brought and how many samples each has.
Act = Callable[[list[Any], list[int]], Any]


@dataclass
class Note:
    """Something noted down by one replica."""

    key: Hashable
    act: Act
    payload: Any
    num_samples: int


@dataclass
class ReplicaContext:
    """The place of one replica during one step.

    Attributes:
        step: The step.
        seat: Its thread's place.
        device: Where it computes.
        num_samples: How many samples its part of the batch has.
        notes: What it has noted down.
        calls: How often it has called what a user may call several times, by its id.
    """

    step: "Step"
    seat: Seat
    device: torch.device
    num_samples: int
    notes: list[Note] = field(default_factory=list)
    calls: Counter[int] = field(default_factory=Counter)

    @property
    def index(self) -> int:
        """Its number, from 0."""
        return self.seat.index

    def meet(
        self, name: str, act: Act, payload: Any = None, of_part: bool = False, touches_weights: bool = True
    ) -> Any:
        """Waits for the other replicas, and returns what ``act`` returned on the main thread, on this device.

        Args:
            name: What is waited for, the same in all replicas.
            act: What happens once.
            payload: What this replica gives.
            of_part: Whether ``act`` returns a tensor with a row per sample, of which this replica gets its samples'.
            touches_weights: Whether ``act`` may change parameters, or whether they need gradients.
        """
        result = self.seat.meet(name, lambda payloads: self.step.carry_out(act, payloads, touches_weights), payload)
        if of_part:
            result = result.narrow(0, sum(self.step.sizes[: self.index]), self.num_samples)
        return result if self.device == self.step.root_device else move_data_to_device(result, self.device)

    def note(self, key: Hashable, act: Act, payload: Any) -> None:
        """Lets ``act`` be called once with what all replicas have noted under this key, before anything they meet for.

        A key that is noted several times stands for as many calls. After the step, as in a hook of the backward pass,
        ``act`` is called at once, for this replica.
        """
        if self.step.is_over:
            act([payload], [self.num_samples])
        else:
            self.notes.append(Note(key, act, payload, self.num_samples))


@dataclass
class Step:
    """One step of a module's replicas.

    Attributes:
        lockstep: The threads.
        root_device: Where whatever happens once happens.
        sizes: The number of samples of each replica.
        numbers: What numbers given in earlier steps have told.
        check: Raises if replicas have changed what they share.
        refresh: Brings the replicas up to date with what has happened to the module in the meantime.
        contexts: The replicas' places.
        is_over: Whether all replicas have returned.
        other_counts: Numbers that replicas have given as ``batch_size`` and that are not their numbers of samples.
    """

    lockstep: Lockstep
    root_device: torch.device
    sizes: list[int]
    numbers: GivenNumbers
    check: Callable[[], None]
    refresh: Callable[[], None]
    contexts: list[ReplicaContext] = field(default_factory=list)
    is_over: bool = False
    other_counts: list[float] | None = None

    def carry_out(self, act: Act, payloads: list[Any], touches_weights: bool) -> Any:
        """Does what replicas wait for, after what they have noted down."""
        self.settle_notes()
        if not touches_weights:
            return act(payloads, self.sizes)
        self.check()
        try:
            return act(payloads, self.sizes)
        finally:
            self.refresh()

    def settle_notes(self) -> None:
        """Carries out what replicas have noted down, in the order of the first that did."""
        matched: dict[tuple[Hashable, int], list[Note]] = {}
        for context in self.contexts:
            seen: Counter[Hashable] = Counter()
            notes, context.notes = context.notes, []
            for note in notes:
                matched.setdefault((note.key, seen[note.key]), []).append(note)
                seen[note.key] += 1
        for same in matched.values():
            same[0].act([note.payload for note in same], [note.num_samples for note in same])

    def are_of_batch(self, key: Hashable, name: str, weights: Sequence[float], sizes: Sequence[int]) -> bool:
        """Whether weights are how much the batch counts. See :meth:`.GivenNumbers.are_of_batch`."""
        return not self.is_over and self.numbers.are_of_batch(key, name, weights, sizes, self.sizes)

    def warn_if_added_repeatedly(self, key: Hashable, name: str, values: Sequence[Any], sizes: Sequence[int]) -> None:
        """Warns if values that are added up are one number. See :meth:`.GivenNumbers.warn_if_added_repeatedly`."""
        if self.is_over or self.numbers.is_settled(key):  # without asking GPUs for values
            return
        if all(isinstance(value, (int, float)) or _is_one_element(value) for value in values):
            are_computed = any(isinstance(value, torch.Tensor) for value in values)
            self.numbers.warn_if_added_repeatedly(key, name, [float(value) for value in values], sizes, are_computed)

    def warn_of_loss(self, denominators: Sequence[Any]) -> None:
        """Warns if losses may be means over the numbers that replicas have given, and nothing is known of the losses.

        Args:
            denominators: For each loss, what :func:`.denominator_of` returned.
        """
        if self.other_counts is not None and any(denominator is None for denominator in denominators):
            self.numbers.warn_of_loss(self.other_counts, self.sizes)

    def end(self) -> None:
        """Carries out what is left after all replicas have returned."""
        self.check()
        self.settle_notes()
        self.is_over = True

    def run_inside(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs a function on each replica's thread while it waits, from within what it waits for."""
        self.refresh()
        results = self.lockstep.run_inside(functions)
        self.check()
        return results


def _is_one_element(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()

"""Context of a replica during a step: its index, its device, and the actions that run once for the whole batch.

A replica either waits for the result of an action (:meth:`ReplicaContext.meet`), or defers the action
(:meth:`ReplicaContext.note`). Deferring does not wait, and not all replicas need to do it.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device

from lightning_strategies_ext.replication.given_numbers import GivenNumbers
from lightning_strategies_ext.replication.lockstep import Lockstep, Seat

#: An action for the whole batch; its arguments are the payload and the number of samples of each replica.
Act = Callable[[list[Any], list[int]], Any]


@dataclass
class Note:
    """An action that one replica has deferred."""

    key: Hashable
    act: Act
    payload: Any
    num_samples: int


@dataclass
class ReplicaContext:
    """Context of one replica during one step.

    Attributes:
        step: Step of all replicas.
        seat: Participant of the lockstep that runs this replica.
        device: Device of this replica.
        num_samples: Number of samples in this replica's part of the batch.
        notes: Actions that this replica has deferred.
        calls: Number of this replica's calls of each metric, by the metric's id.
    """

    step: "Step"
    seat: Seat
    device: torch.device
    num_samples: int
    notes: list[Note] = field(default_factory=list)
    calls: Counter[int] = field(default_factory=Counter)

    @property
    def index(self) -> int:
        """Index of this replica, from 0."""
        return self.seat.index

    def meet(
        self, name: str, act: Act, payload: Any = None, of_part: bool = False, touches_weights: bool = True
    ) -> Any:
        """Waits for the other replicas, runs ``act`` once on the main thread, and returns its result on this device.

        Args:
            name: Name of the action in messages, equal in all replicas.
            act: Action to run once.
            payload: Argument of this replica for ``act``.
            of_part: Whether ``act`` returns a tensor with a row per sample, of which this replica receives only the
                rows of its samples.
            touches_weights: Whether ``act`` may change parameters or their ``requires_grad``.
        """
        result = self.seat.meet(name, lambda payloads: self.step.carry_out(act, payloads, touches_weights), payload)
        if of_part:
            result = result.narrow(0, sum(self.step.sizes[: self.index]), self.num_samples)
        return result if self.device == self.step.root_device else move_data_to_device(result, self.device)

    def note(self, key: Hashable, act: Act, payload: Any) -> None:
        """Defers ``act``: it runs once with the payloads of all replicas that used this key, before the next action.

        If a replica uses a key several times, ``act`` runs as often. After the step, for example in a hook of the
        backward pass, ``act`` runs immediately, for this replica only.

        Args:
            key: Identifier that matches the deferred actions of different replicas.
            act: Action to run once.
            payload: Argument of this replica for ``act``.
        """
        if self.step.is_over:
            act([payload], [self.num_samples])
        else:
            self.notes.append(Note(key, act, payload, self.num_samples))


@dataclass
class Step:
    """One step of a module's replicas.

    Attributes:
        lockstep: Lockstep that runs the replicas.
        root_device: Device of the module, on which actions for the whole batch run.
        sizes: Number of samples of each replica.
        numbers: Statistics of the numbers passed in earlier steps.
        check: Raises if replicas have written to shared tensors.
        refresh: Updates the replicas after a change of the module's parameters.
        contexts: Contexts of the replicas.
        is_over: Whether all replicas have returned.
        other_counts: Values of ``batch_size`` that are not the replicas' numbers of samples, if any.
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
        """Runs an action that replicas wait for, after their deferred actions."""
        self.settle_notes()
        if not touches_weights:
            return act(payloads, self.sizes)
        self.check()
        try:
            return act(payloads, self.sizes)
        finally:
            self.refresh()

    def settle_notes(self) -> None:
        """Runs the deferred actions, in the order of the first replica that deferred each."""
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
        """Returns whether weights belong to the whole batch, see :meth:`.GivenNumbers.are_of_batch`."""
        return not self.is_over and self.numbers.are_of_batch(key, name, weights, sizes, self.sizes)

    def warn_if_added_repeatedly(self, key: Hashable, name: str, values: Sequence[Any], sizes: Sequence[int]) -> None:
        """Warns if replicas sum equal values, see :meth:`.GivenNumbers.warn_if_added_repeatedly`."""
        if self.is_over or self.numbers.is_settled(key):  # avoids a synchronization with GPUs
            return
        if all(isinstance(value, (int, float)) or _is_one_element(value) for value in values):
            are_computed = any(isinstance(value, torch.Tensor) for value in values)
            self.numbers.warn_if_added_repeatedly(key, name, [float(value) for value in values], sizes, are_computed)

    def warn_of_loss(self, denominators: Sequence[Any]) -> None:
        """Warns if a loss of unknown denominator may be a mean over ``other_counts``.

        Args:
            denominators: Result of :func:`.denominator_of` for each loss.
        """
        if self.other_counts is not None and any(denominator is None for denominator in denominators):
            self.numbers.warn_of_loss(self.other_counts, self.sizes)

    def end(self) -> None:
        """Runs the remaining deferred actions, after all replicas have returned."""
        self.check()
        self.settle_notes()
        self.is_over = True

    def run_inside(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs a function on each replica's thread, from within an action that the replicas wait for."""
        self.refresh()
        results = self.lockstep.run_inside(functions)
        self.check()
        return results


def _is_one_element(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()

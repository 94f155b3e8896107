"""Context of a replica during a step: its index, its device, and the actions that run once for the whole batch.

A replica either waits for the result of an action (:meth:`ReplicaContext.run_once`), or defers the action
(:meth:`ReplicaContext.defer`). Deferring does not wait, and not all replicas need to do it.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device

from lightning_strategies_ext.replication.lockstep import Lockstep, Participant
from lightning_strategies_ext.replication.number_scopes import NumberScopes

#: An action for the whole batch; its arguments are the payload and the number of samples of each replica.
OnceAction = Callable[[list[Any], list[int]], Any]


@dataclass
class DeferredAction:
    """An action that one replica has deferred."""

    key: Hashable
    act: OnceAction
    payload: Any
    num_samples: int


@dataclass
class ReplicaContext:
    """Context of one replica during one step.

    Attributes:
        step: Step of all replicas.
        participant: Participant of the lockstep that runs this replica.
        device: Device of this replica.
        num_samples: Number of samples in this replica's part of the batch.
        deferred: Actions that this replica has deferred.
        calls: Number of this replica's calls of each metric, by the metric's id.
    """

    step: "ReplicaStep"
    participant: Participant
    device: torch.device
    num_samples: int
    deferred: list[DeferredAction] = field(default_factory=list)
    calls: Counter[int] = field(default_factory=Counter)

    @property
    def index(self) -> int:
        """Index of this replica, from 0."""
        return self.participant.index

    def run_once(
        self, name: str, act: OnceAction, payload: Any = None, returns_rows: bool = False, touches_weights: bool = True
    ) -> Any:
        """Waits for the other replicas, runs ``act`` once on the main thread, and returns its result on this device.

        Args:
            name: Name of the action in messages, equal in all replicas.
            act: Action to run once.
            payload: Argument of this replica for ``act``.
            returns_rows: Whether ``act`` returns a tensor with a row per sample, of which this replica receives only
                the rows of its samples.
            touches_weights: Whether ``act`` may change parameters or their ``requires_grad``.
        """
        result = self.participant.run_once(
            name, lambda payloads: self.step.run_action(act, payloads, touches_weights), payload
        )
        if returns_rows:
            result = result.narrow(0, sum(self.step.sizes[: self.index]), self.num_samples)
        return result if self.device == self.step.root_device else move_data_to_device(result, self.device)

    def defer(self, key: Hashable, act: OnceAction, payload: Any) -> None:
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
            self.deferred.append(DeferredAction(key, act, payload, self.num_samples))


@dataclass
class ReplicaStep:
    """One step of a module's replicas.

    Attributes:
        lockstep: Lockstep that runs the replicas.
        root_device: Device of the module, on which actions for the whole batch run.
        sizes: Number of samples of each replica.
        number_scopes: Statistics of the numbers passed in earlier steps.
        check: Raises if replicas have written to shared tensors.
        refresh: Updates the replicas after a change of the module's parameters.
        contexts: Contexts of the replicas.
        is_over: Whether all replicas have returned.
        other_counts: Values of ``batch_size`` that are not the replicas' numbers of samples, if any.
    """

    lockstep: Lockstep
    root_device: torch.device
    sizes: list[int]
    number_scopes: NumberScopes
    check: Callable[[], None]
    refresh: Callable[[], None]
    contexts: list[ReplicaContext] = field(default_factory=list)
    is_over: bool = False
    other_counts: list[float] | None = None

    def run_action(self, act: OnceAction, payloads: list[Any], touches_weights: bool) -> Any:
        """Runs an action that replicas wait for, after their deferred actions."""
        self.run_deferred()
        if not touches_weights:
            return act(payloads, self.sizes)
        self.check()
        try:
            return act(payloads, self.sizes)
        finally:
            self.refresh()

    def run_deferred(self) -> None:
        """Runs the deferred actions, in the order of the first replica that deferred each."""
        matched: dict[tuple[Hashable, int], list[DeferredAction]] = {}
        for context in self.contexts:
            seen: Counter[Hashable] = Counter()
            deferred, context.deferred = context.deferred, []
            for action in deferred:
                matched.setdefault((action.key, seen[action.key]), []).append(action)
                seen[action.key] += 1
        for same in matched.values():
            same[0].act([each.payload for each in same], [each.num_samples for each in same])

    def are_batch_weights(self, key: Hashable, name: str, weights: Sequence[float], sizes: Sequence[int]) -> bool:
        """Returns whether weights belong to the whole batch, see :meth:`.NumberScopes.are_batch_weights`."""
        return not self.is_over and self.number_scopes.are_batch_weights(key, name, weights, sizes, self.sizes)

    def warn_if_added_repeatedly(self, key: Hashable, name: str, values: Sequence[Any], sizes: Sequence[int]) -> None:
        """Warns if replicas sum equal values, see :meth:`.NumberScopes.warn_if_added_repeatedly`."""
        if self.is_over or self.number_scopes.is_settled(key):  # avoids a synchronization with GPUs
            return
        if all(isinstance(value, (int, float)) or _is_one_element(value) for value in values):
            are_computed = any(isinstance(value, torch.Tensor) for value in values)
            self.number_scopes.warn_if_added_repeatedly(
                key, name, [float(value) for value in values], sizes, are_computed
            )

    def warn_of_loss(self, denominators: Sequence[Any]) -> None:
        """Warns if a loss of unknown denominator may be a mean over ``other_counts``.

        Args:
            denominators: Result of :func:`.denominator_of` for each loss.
        """
        if self.other_counts is not None and any(denominator is None for denominator in denominators):
            self.number_scopes.warn_of_loss(self.other_counts, self.sizes)

    def end(self) -> None:
        """Runs the remaining deferred actions, after all replicas have returned."""
        self.check()
        self.run_deferred()
        self.is_over = True

    def run_nested(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs a function on each replica's thread, from within an action that the replicas wait for."""
        self.refresh()
        results = self.lockstep.run_nested(functions)
        self.check()
        return results


def _is_one_element(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()

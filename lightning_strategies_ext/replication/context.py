"""Context of a replica during a step: its index, its device, and the actions that run once for the whole batch.

A replica either waits for the result of an action (:meth:`ReplicaContext.run_once`), or defers the action
(:meth:`ReplicaContext.defer`). ``defer`` does not wait, and not all replicas need to call it.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device

from lightning_strategies_ext.nested import copy_data, is_collection, parts_of, replace_tensors
from lightning_strategies_ext.replication.lockstep import Lockstep, Participant
from lightning_strategies_ext.replication.number_scopes import NumberScopes

#: An action for the whole batch; its arguments are the payloads and the numbers of samples of the replicas.
OnceAction = Callable[[list[Any], list[int]], Any]


@dataclass
class DeferredAction:
    """An action that one replica has deferred."""

    key: Hashable
    action: OnceAction
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
        metric_calls: Number of this replica's calls of each metric, by the metric's id.
        sources: This replica's copies of tensors in the results of actions, by the copy's id, each with its original
            and its version at the time of the copy.
    """

    step: "ReplicaStep"
    participant: Participant
    device: torch.device
    num_samples: int
    deferred: list[DeferredAction] = field(default_factory=list)
    metric_calls: Counter[int] = field(default_factory=Counter)
    sources: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """Index of this replica, from 0."""
        return self.participant.index

    @property
    def is_alone(self) -> bool:
        """Whether this is the only replica of the step, for a batch with one sample or without samples."""
        return len(self.step.contexts) == 1

    def run_once(
        self,
        name: str,
        action: OnceAction,
        payload: Any = None,
        returns_rows: bool = False,
        changes_parameters: bool = True,
        key: Hashable = None,
    ) -> Any:
        """Waits for the other replicas, and returns the result of an action that runs once, on the caller's thread.

        Args:
            name: Name of the action in messages, equal in all replicas.
            action: Action to run once.
            payload: Argument of this replica for the action.
            returns_rows: Whether the action returns a tensor with a row per sample. This replica receives only the rows
                of its samples.
            changes_parameters: Whether the action may change parameters or their ``requires_grad``.
            key: Identifier of the object to which the action belongs, equal in all replicas.

        Returns:
            The result of the action, on the device of this replica.
        """
        result = self.participant.run_once(
            name, lambda payloads: self.step.run_action(action, payloads, changes_parameters), payload, key
        )
        if returns_rows:
            result = result.narrow(0, sum(self.step.sizes[: self.index]), self.num_samples)
            return result if self.device == self.step.root_device else move_data_to_device(result, self.device)
        if self.is_alone:
            return result  # it is on the root device
        if self.device == self.step.root_device:
            received = copy_data(result)  # a replica may write to its result in place
        else:
            received = move_data_to_device(result, self.device)
        self._record_sources(result, received)
        return received

    def source_of(self, value: Any) -> Any:
        """Returns the original if the value is an unchanged copy of a result of :meth:`run_once`, else the value."""
        if id(value) not in self.sources:
            return value
        copied, original, version = self.sources[id(value)]
        if version is None:  # tensors that were created in inference mode have no version
            return original if torch.equal(copied, original.to(copied.device)) else value
        return original if copied._version == version else value

    def _record_sources(self, result: Any, received: Any) -> None:
        if isinstance(received, torch.Tensor):
            self.step.has_copies = True
            self.sources[id(received)] = (received, result, None if received.is_inference() else received._version)
        elif is_collection(received):
            for part, copied in zip(parts_of(result), parts_of(received), strict=True):
                self._record_sources(part, copied)

    def defer(self, key: Hashable, action: OnceAction, payload: Any) -> None:
        """Defers an action: it runs before the next action that replicas wait for, or at the end of the step.

        The action runs once with the payloads of all replicas that used this key. If a replica uses a key several
        times, the action runs once for each use. After the step, for example in a hook of the backward pass, the action
        runs immediately, for this replica only. If there is only one replica, it always runs immediately.

        Args:
            key: Identifier that matches the deferred actions of different replicas.
            action: Action to run once.
            payload: Argument of this replica for the action, which the replica does not change afterwards.
        """
        if self.step.is_over or self.is_alone:
            action([payload], [self.num_samples])
        else:
            self.deferred.append(DeferredAction(key, action, payload, self.num_samples))


@dataclass
class ReplicaStep:
    """One step of a module's replicas.

    Attributes:
        lockstep: Lockstep that runs the replicas.
        root_device: Device of the module, on which actions for the whole batch run.
        sizes: Number of samples of each replica.
        number_scopes: Statistics of the numbers that replicas have passed to ``self.log`` and to metrics.
        check_writes: Raises if replicas have written to shared tensors.
        refresh: Updates the replicas after a change of the module's parameters.
        lengths: Number of entries of a list with one entry per sample, in each replica, if ``sizes`` may be other
            numbers, such as numbers of tokens.
        contexts: Contexts of the replicas.
        is_over: Whether all replicas have returned.
        has_copies: Whether replicas have received copies of tensors in the results of actions.
        other_batch_sizes: Values of ``self.log(batch_size=...)`` in the replicas that are not in proportion to their
            numbers of samples, such as numbers of tokens; None if there are none.
    """

    lockstep: Lockstep
    root_device: torch.device
    sizes: list[int]
    number_scopes: NumberScopes
    check_writes: Callable[[], None]
    refresh: Callable[[], None]
    lengths: Sequence[int] | None = None
    contexts: list[ReplicaContext] = field(default_factory=list)
    is_over: bool = False
    has_copies: bool = False
    other_batch_sizes: list[float] | None = None

    def run_action(self, action: OnceAction, payloads: list[Any], changes_parameters: bool) -> Any:
        """Runs an action that replicas wait for, after their deferred actions."""
        self.run_deferred()
        if not changes_parameters:
            return action(payloads, self.sizes)
        self.check_writes()
        try:
            return action(payloads, self.sizes)
        finally:
            self.refresh()

    def run_deferred(self) -> None:
        """Runs the deferred actions, in the order of the first replica that deferred each."""
        matched: dict[tuple[Hashable, int], list[DeferredAction]] = {}
        for context in self.contexts:
            uses: Counter[Hashable] = Counter()
            deferred, context.deferred = context.deferred, []
            for action in deferred:
                matched.setdefault((action.key, uses[action.key]), []).append(action)
                uses[action.key] += 1
        for actions in matched.values():
            actions[0].action([each.payload for each in actions], [each.num_samples for each in actions])

    def with_shared_results(self, values: Sequence[Any]) -> list[Any]:
        """Returns the value of each replica, with one tensor in place of the replicas' unchanged copies of one result.

        The mean of one tensor is exact; the mean of its copies may differ in the last bit.
        """
        tensors: dict[int, torch.Tensor] = {}

        def share(context: ReplicaContext, value: Any) -> Any:
            return replace_tensors(value, lambda tensor: tensors.setdefault(id(context.source_of(tensor)), tensor))

        return [share(context, value) for context, value in zip(self.contexts, values, strict=True)]

    def are_batch_weights(self, key: Hashable, name: str, weights: Sequence[float], sizes: Sequence[int]) -> bool:
        """Returns whether weights belong to the whole batch, see :meth:`.NumberScopes.are_batch_weights`."""
        return not self.is_over and self.number_scopes.are_batch_weights(key, name, weights, sizes, self.sizes)

    def warn_if_added_repeatedly(self, key: Hashable, name: str, values: Sequence[Any], sizes: Sequence[int]) -> None:
        """Warns if replicas add a number of the batch, see :meth:`.NumberScopes.warn_if_added_repeatedly`."""
        if self.is_over or self.number_scopes.has_checked_sums(key):  # avoids a synchronization with GPUs
            return
        if all(isinstance(value, (int, float)) or _is_one_element(value) for value in values):
            are_computed = any(isinstance(value, torch.Tensor) for value in values)
            self.number_scopes.warn_if_added_repeatedly(
                key, name, [float(value) for value in values], sizes, are_computed
            )

    def warn_of_loss(self, denominators: Sequence[Any]) -> None:
        """Warns if a loss may be a mean over ``other_batch_sizes``, because its denominator is unknown.

        Args:
            denominators: Result of :func:`.denominator_of` for each loss.
        """
        if self.other_batch_sizes is not None and any(denominator is None for denominator in denominators):
            self.number_scopes.warn_of_loss(self.other_batch_sizes, self.sizes)

    def end(self) -> None:
        """Runs the remaining deferred actions, after all replicas have returned."""
        self.check_writes()
        self.run_deferred()
        self.is_over = True

    def run_nested(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs a function on each replica's thread, from within an action that the replicas wait for."""
        self.refresh()
        results = self.lockstep.run_nested(functions)
        self.check_writes()
        return results


def _is_one_element(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()

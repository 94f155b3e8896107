"""Replica of a LightningModule, whose logging and optimizer calls run once for the whole batch."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import wrapt
from torch import Tensor

from lightning_strategies_ext.replication.context import ReplicaContext
from lightning_strategies_ext.replication.denominators import denominator_of
from lightning_strategies_ext.replication.gathering import value_of_batch
from lightning_strategies_ext.replication.splitting import LIBRARY_ADVICE


def patch_replica(replica: Any, original: Any, context: ReplicaContext) -> None:
    """Replaces the methods of a replica that must run once for the whole batch.

    Args:
        replica: Copy of a LightningModule.
        original: The LightningModule.
        context: Context of the replica.
    """
    root_device = context.step.root_device

    def create_method(name: str) -> Callable[..., Any]:
        """Returns a method that calls the original method once, with the arguments of the first replica."""

        def method(*args: Any, **kwargs: Any) -> Any:
            unwrapped = tuple(map(_unwrap, args)), {key: _unwrap(value) for key, value in kwargs.items()}
            return context.run_once(f"self.{name}", action, unwrapped)

        def action(payloads: list[Any], sizes: list[int]) -> Any:
            args, kwargs = payloads[0]
            return getattr(original, name)(*args, **kwargs)

        return method

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        def action(losses: list[Tensor], sizes: list[int]) -> None:
            denominators = list(map(denominator_of, losses))
            if context.step.other_batch_sizes is not None:
                context.step.warn_of_loss(denominators)
            original.manual_backward(value_of_batch(losses, denominators, sizes, root_device), *args, **kwargs)

        context.run_once("self.manual_backward", action, loss)

    def optimizers(use_pl_optimizer: bool = True) -> Any:
        return create_proxies(original.optimizers(use_pl_optimizer), ReplicaOptimizer, "optimizer")

    def lr_schedulers() -> Any:
        return create_proxies(original.lr_schedulers(), ReplicaScheduler, "scheduler")

    def create_proxies(shared: Any, proxy_class: type[_SharedProxy], name: str) -> Any:
        if isinstance(shared, (list, tuple)):
            return [proxy_class(item, f"{name} {index}", context) for index, item in enumerate(shared)]
        return None if shared is None else proxy_class(shared, f"{name} 0", context)

    def log(
        name: str,
        value: Any,
        *args: Any,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        enable_graph: bool = False,
        **kwargs: Any,
    ) -> None:
        def action(payloads: list[LoggedValue], sizes: list[int]) -> None:
            values = [_unwrap(logged.value) for logged in payloads]
            denominators = [logged.denominator for logged in payloads]
            is_of_batch = all(logged.source is payloads[0].source for logged in payloads)
            if is_of_batch:
                values = values[:1] * len(values)
            given = [logged.batch_size for logged in payloads]
            weights = [size if weight is None else weight for weight, size in zip(given, sizes, strict=True)]
            total = sum(weights)
            reduction = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
            reduction = {"avg": "mean"}.get(reduction.lower(), reduction.lower())  # as Lightning does
            call_site, call, step = (id(original), name), f"`self.log({name!r}, ...)`", context.step
            if reduction == "sum" and not (is_of_batch and isinstance(values[0], Tensor)):  # which is not added
                step.warn_if_added_repeatedly(call_site, call, values, sizes)
            elif reduction == "mean" and batch_size is not None:
                batch_sizes = [float(weight) for weight in weights]
                if step.are_batch_weights(call_site, call, batch_sizes, sizes):
                    # The total is the sum of the weights in a full batch, as for weights of the parts.
                    weights, total = sizes, weights[0] * step.number_scopes.num_replicas
                elif any(n * sizes[0] != batch_sizes[0] * size for n, size in zip(batch_sizes, sizes, strict=True)):
                    step.other_batch_sizes = batch_sizes
            original.log(
                name,
                reduce_logged(name, values, denominators, weights, reduction, root_device),
                *args,
                reduce_fx=reduce_fx,
                batch_size=total,
                enable_graph=enable_graph,
                **kwargs,
            )

        logged = LoggedValue(value, context.source_of(value), denominator_of(value), batch_size)
        if isinstance(value, Tensor):  # copied, because the step may write to it in place before the action runs
            logged.value = (value if enable_graph else value.detach()).clone()
        context.defer((id(original), "log", name), action, logged)

    def print_once(*args: Any, **kwargs: Any) -> None:
        if context.index == 0:
            original.print(*args, **kwargs)

    methods: dict[str, Callable[..., Any]] = {
        "log": log,
        "manual_backward": manual_backward,
        "optimizers": optimizers,
        "lr_schedulers": lr_schedulers,
        "print": print_once,
    }
    for name in ("toggle_optimizer", "untoggle_optimizer", "clip_gradients", "zero_grad"):
        methods[name] = create_method(name)
    replica.__dict__.update(methods)


@dataclass
class LoggedValue:
    """Value that a replica passes to ``self.log``.

    Attributes:
        value: The value; a copy if it is a tensor.
        source: Object that was passed; for a result of an action, the original of the copy. One tensor in all replicas
            is a value of the whole batch.
        denominator: Result of :func:`.denominator_of`.
        batch_size: Argument of ``self.log``.
    """

    value: Any
    source: Any
    denominator: Any
    batch_size: int | None


def reduce_logged(
    name: str,
    values: Sequence[Any],
    denominators: Sequence[Any],
    weights: Sequence[int],
    reduction: str,
    device: torch.device,
) -> Any:
    """Reduces the values that replicas have logged under one name to one value.

    Args:
        name: Name of the logged value.
        values: Numbers, tensors of one element, or the same metric from each replica.
        denominators: Result of :func:`.denominator_of` for each value.
        weights: Number of samples of each value.
        reduction: Name of the reduction over batches in ``self.log``, which is also used over replicas.
        device: Device of the result.

    Raises:
        ValueError: If the reduction is a mean and the values are different integers.
    """
    numbers = (int, float, bool)
    if not all(isinstance(v, numbers) or (isinstance(v, Tensor) and v.numel() == 1) for v in values):
        return values[0]  # a metric; Lightning raises an error for other types
    # A tensor that is one object in all replicas belongs to the whole batch, also in a sum. A number may not: equal
    # integers are often one object, and each replica may have counted its part.
    if all(value is values[0] for value in values) and not (reduction == "sum" and isinstance(values[0], numbers)):
        return values[0]
    tensors = [torch.as_tensor(value, device=device).reshape(()) for value in values]
    are_integers = not any(tensor.is_floating_point() for tensor in tensors)
    tensors = [tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype()) for tensor in tensors]
    if reduction == "sum":
        return torch.stack(tensors).sum()
    if reduction in ("min", "max"):
        return getattr(torch.stack(tensors), reduction)()
    if are_integers and len({tensor.item() for tensor in tensors}) > 1:
        raise ValueError(
            f"`self.log({name!r}, ...)`: replicas log different integers for their parts of the batch"
            f" ({', '.join(f'{tensor.item():g}' for tensor in tensors)}), and the mean of counts is not the count for"
            ' the whole batch. Choose a reduction (`reduce_fx="sum"`, `"max"` or `"min"`), or log a mean over samples'
            f" as a float. {LIBRARY_ADVICE}"
        )
    return value_of_batch(tensors, denominators, weights, device)


class _SharedProxy(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Proxy in a replica of an object that all replicas share. ``wrapt`` requires the prefix ``_self_``.

    Args:
        shared: Shared object.
        name: Name of the object in messages.
        context: Context of the replica.
    """

    def __init__(self, shared: Any, name: str, context: ReplicaContext) -> None:
        super().__init__(shared)
        self._self_name = name
        self._self_context = context


class ReplicaOptimizer(_SharedProxy):
    """Proxy of an optimizer in a replica, which steps and zeroes gradients once for all replicas."""

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps once, after all replicas have called it. A closure runs in each replica, and the losses are merged."""
        optimizer, context = self.__wrapped__, self._self_context

        def action(closures: list[Any], sizes: list[int]) -> Any:
            if closures[0] is None:
                return optimizer.step(**kwargs)

            def run_closures() -> Any:
                values = context.step.run_nested(closures)
                denominators = list(map(denominator_of, values))
                root_device = context.step.root_device
                return None if values[0] is None else value_of_batch(values, denominators, sizes, root_device)

            return optimizer.step(closure=run_closures, **kwargs)

        return context.run_once(f"the step of {self._self_name}", action, closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zeroes the gradients once, after all replicas have called it."""
        optimizer = self.__wrapped__
        self._self_context.run_once(
            f"zeroing gradients of {self._self_name}", lambda payloads, sizes: optimizer.zero_grad(*args, **kwargs)
        )

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Generator[None, None, None]:
        """Restricts gradients to the parameters of this optimizer inside the context."""
        run_once, optimizer = self._self_context.run_once, self.__wrapped__

        def enter(payloads: list[Any], sizes: list[int]) -> Any:
            context = optimizer.toggle_model(sync_grad=sync_grad)
            context.__enter__()
            return context

        toggled = run_once(f"toggling {self._self_name}", enter)
        yield
        run_once(f"untoggling {self._self_name}", lambda payloads, sizes: toggled.__exit__(None, None, None))


class ReplicaScheduler(_SharedProxy):
    """Proxy of a learning rate scheduler in a replica, which steps once for all replicas."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps once, after all replicas have called it. A monitored value is averaged over the whole batch."""
        scheduler, context = self.__wrapped__, self._self_context

        def action(payloads: list[tuple[tuple[Any, ...], dict[str, Any]]], sizes: list[int]) -> Any:
            def merge(values: list[Any]) -> Any:
                if isinstance(values[0], float) or (isinstance(values[0], Tensor) and values[0].ndim == 0):
                    return value_of_batch(values, list(map(denominator_of, values)), sizes, context.step.root_device)
                return values[0]

            payloads = context.step.with_shared_results(payloads)
            positional = [merge([given[i] for given, _ in payloads]) for i in range(len(args))]
            named = {key: merge([given[key] for _, given in payloads]) for key in kwargs}
            return scheduler.step(*positional, **named)

        return context.run_once(f"the step of {self._self_name}", action, (args, kwargs))


def _unwrap(value: Any) -> Any:
    return value.__wrapped__ if isinstance(value, wrapt.ObjectProxy) else value

"""Replica of a LightningModule, whose logging and optimizer calls run once for the whole batch."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import wrapt
from torch import Tensor

from lightning_strategies_ext.replication.context import ReplicaContext
from lightning_strategies_ext.replication.gathering import denominator_of, value_of_batch, weighted_mean
from lightning_strategies_ext.replication.single_process import IF_OF_A_LIBRARY


def patch_replica(replica: Any, original: Any, context: ReplicaContext) -> None:
    """Replaces the methods of a replica that affect shared state.

    Args:
        replica: Copy of a LightningModule.
        original: The LightningModule.
        context: Context of the replica.
    """
    root_device = context.step.root_device

    def once(name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            unwrapped = tuple(map(_unwrapped, args)), {key: _unwrapped(value) for key, value in kwargs.items()}
            return context.run_once(f"self.{name}", act, unwrapped)

        def act(payloads: list[Any], sizes: list[int]) -> Any:
            args, kwargs = payloads[0]
            return getattr(original, name)(*args, **kwargs)

        return method

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        def act(losses: list[Tensor], sizes: list[int]) -> None:
            denominators = list(map(denominator_of, losses))
            if context.step.other_counts is not None:
                context.step.warn_of_loss(denominators)
            original.manual_backward(value_of_batch(losses, denominators, sizes, root_device), *args, **kwargs)

        context.run_once("self.manual_backward", act, loss)

    def optimizers(use_pl_optimizer: bool = True) -> Any:
        return proxies(original.optimizers(use_pl_optimizer), ReplicaOptimizer, "optimizer")

    def lr_schedulers() -> Any:
        return proxies(original.lr_schedulers(), ReplicaScheduler, "scheduler")

    def proxies(shared: Any, kind: type[_SharedProxy], name: str) -> Any:
        if isinstance(shared, (list, tuple)):
            return [kind(one, f"{name} {number}", context) for number, one in enumerate(shared)]
        return None if shared is None else kind(shared, f"{name} 0", context)

    def log(
        name: str,
        value: Any,
        *args: Any,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        enable_graph: bool = False,
        **kwargs: Any,
    ) -> None:
        def act(payloads: list[tuple[Any, Any, int | None]], sizes: list[int]) -> None:
            values = [_unwrapped(value) for value, _, _ in payloads]
            denominators = [denominator for _, denominator, _ in payloads]
            weights = [size if given is None else given for (_, _, given), size in zip(payloads, sizes, strict=True)]
            total = sum(weights)
            how, call, step = _name_of(reduce_fx), f"`self.log({name!r}, ...)`", context.step
            site = (id(original), name)
            if how == "sum":
                step.warn_if_added_repeatedly(site, call, values, sizes)
            elif how == "mean" and batch_size is not None:
                counts = [float(weight) for weight in weights]
                if step.are_batch_weights(site, call, counts, sizes):
                    weights, total = sizes, weights[0] * step.number_scopes.num_replicas
                elif any(count * sizes[0] != counts[0] * size for count, size in zip(counts, sizes, strict=True)):
                    step.other_counts = counts
            original.log(
                name,
                reduced(name, values, denominators, weights, reduce_fx, root_device),
                *args,
                reduce_fx=reduce_fx,
                batch_size=total,
                enable_graph=enable_graph,
                **kwargs,
            )

        payload = value if enable_graph else _detached(value), denominator_of(value), batch_size
        context.defer((id(original), "log", name), act, payload)

    def print_once(*args: Any, **kwargs: Any) -> None:
        if context.index == 0:
            original.print(*args, **kwargs)

    replaced: dict[str, Callable[..., Any]] = {
        "log": log,
        "manual_backward": manual_backward,
        "optimizers": optimizers,
        "lr_schedulers": lr_schedulers,
        "print": print_once,
    }
    for name in ("toggle_optimizer", "untoggle_optimizer", "clip_gradients", "zero_grad"):
        replaced[name] = once(name)
    replica.__dict__.update(replaced)


def reduced(
    name: str,
    values: Sequence[Any],
    denominators: Sequence[Any],
    weights: Sequence[int],
    reduce_fx: Any,
    device: torch.device,
) -> Any:
    """Reduces the values that replicas have logged under one name to one value.

    Args:
        name: Name of the logged value.
        values: Numbers, tensors of one element, or the same metric from each replica.
        denominators: Result of :func:`.denominator_of` for each value.
        weights: Number of samples of each value.
        reduce_fx: Argument of ``self.log``; its reduction over batches is also used over replicas.
        device: Device of the result.

    Raises:
        ValueError: If ``reduce_fx`` is a mean and the values are different integers.
    """
    numbers = (int, float, bool)
    if not all(isinstance(v, numbers) or (isinstance(v, Tensor) and v.numel() == 1) for v in values):
        return values[0]  # a metric; Lightning raises an error for other types
    how = _name_of(reduce_fx)
    # Equal integers are often the same object, and each may be a count of its part.
    if all(value is values[0] for value in values) and not (how == "sum" and isinstance(values[0], numbers)):
        return values[0]
    tensors = [torch.as_tensor(value, device=device).reshape(()) for value in values]
    is_whole = not any(tensor.is_floating_point() for tensor in tensors)
    tensors = [tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype()) for tensor in tensors]
    if how == "sum":
        return torch.stack(tensors).sum()
    if how in ("min", "max"):
        return getattr(torch.stack(tensors), how)()
    if is_whole and len({tensor.item() for tensor in tensors}) > 1:
        raise ValueError(
            f"`self.log({name!r}, ...)`: replicas log different integers for their parts of the batch"
            f" ({', '.join(f'{tensor.item():g}' for tensor in tensors)}), and the mean of counts is not the count of"
            ' the whole batch. Choose a reduction (`reduce_fx="sum"`, `"max"` or `"min"`), or log a mean over samples'
            f" as a float. {IF_OF_A_LIBRARY}"
        )
    return value_of_batch(tensors, denominators, weights, device)


class _SharedProxy(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Proxy in a replica of an object that all replicas share.

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

        def act(closures: list[Any], sizes: list[int]) -> Any:
            if closures[0] is None:
                return optimizer.step(**kwargs)

            def closure_of_all() -> Any:
                values = context.step.run_nested(closures)
                denominators = list(map(denominator_of, values))
                root_device = context.step.root_device
                return None if values[0] is None else value_of_batch(values, denominators, sizes, root_device)

            return optimizer.step(closure=closure_of_all, **kwargs)

        return context.run_once(f"the step of {self._self_name}", act, closure)

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
        entered: list[Any] = []

        def enter(payloads: list[Any], sizes: list[int]) -> Any:
            context = optimizer.toggle_model(sync_grad=sync_grad)
            context.__enter__()
            return context

        entered.append(run_once(f"toggling {self._self_name}", enter))
        yield
        run_once(f"untoggling {self._self_name}", lambda payloads, sizes: entered[0].__exit__(None, None, None))


class ReplicaScheduler(_SharedProxy):
    """Proxy of a learning rate scheduler in a replica, which steps once for all replicas."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps once, after all replicas have called it. A metric argument is averaged over the whole batch."""
        scheduler, context = self.__wrapped__, self._self_context

        def act(payloads: list[tuple[tuple[Any, ...], dict[str, Any]]], sizes: list[int]) -> Any:
            def common(values: list[Any]) -> Any:
                is_measured = isinstance(values[0], float) or (isinstance(values[0], Tensor) and values[0].ndim == 0)
                return weighted_mean(values, sizes, context.step.root_device) if is_measured else values[0]

            positional = [common([args[i] for args, _ in payloads]) for i in range(len(args))]
            named = {key: common([kwargs[key] for _, kwargs in payloads]) for key in kwargs}
            return scheduler.step(*positional, **named)

        return context.run_once(f"the step of {self._self_name}", act, (args, kwargs))


def _unwrapped(value: Any) -> Any:
    return value.__wrapped__ if isinstance(value, wrapt.ObjectProxy) else value


def _name_of(reduce_fx: Any) -> str:
    return reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value

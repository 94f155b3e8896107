"""Advice on arguments of DDP: those that would have prevented an error, or would have made training faster."""

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext.failure.failure_report import advise
from lightning_strategies_ext.registry import name_with

_has_advised_static_graph = False


def advise_static_graph(model: DistributedDataParallel, strategy_name: str) -> None:
    """Logs once per process that a model trained with ``find_unused_parameters`` qualifies for static-graph mode.

    Without ``find_unused_parameters`` the mode has no benefit: DDP does not traverse the graph.
    """
    global _has_advised_static_graph
    if _has_advised_static_graph or model.static_graph or not model.find_unused_parameters:
        return
    # Read from the reducer, because the field "can_set_static_graph" of DDP's logging data, which torch documents for
    # this question, stays empty (observed in torch 2.13).
    is_static = getattr(model.reducer, "_ddp_graph_static", None)
    if is_static is not None and is_static():
        _has_advised_static_graph = True
        rank_zero_info(
            "Every training step used the same parameters in the same order, so DDP need not search for unused"
            f" parameters in each step. Use `strategy={strategy_name}(static_graph=True)`, with which it searches"
            " once."
        )


def explain_unused_parameters(exception: BaseException, strategy: Any, step: str) -> None:
    """Prepends advice to the message of an exception, if it is DDP's exception about unused parameters.

    The caller does so before it publishes the failure: other ranks and the report show the message as it is then.

    Args:
        exception: Exception with which this rank exits.
        strategy: Strategy of the Trainer or Fabric, whose name the advice mentions.
        step: Name of the method that computes the loss.
    """
    message = exception.args[0] if exception.args else None
    prefixes = ("Expected to have finished reduction in the prior", "Your training graph has changed")
    if not isinstance(message, str):
        return
    if message.startswith("Expected sparse gradient to be defined"):
        advise(
            exception,
            f"The sparse gradient of an embedding is missing: it takes no part in the loss of {step}, and DDP's"
            " `find_unused_parameters=True` finds dense parameters only. Use the embedding in each backward pass, or"
            " omit `sparse=True`.",
        )
        return
    if not message.startswith(prefixes):
        return
    if "`find_unused_parameters=True` is enabled" in message:  # torch's message contains the advice
        return
    name = name_with(type(strategy), start_method=strategy._start_method, find_unused_parameters=True)
    remedy = f"`{type(strategy).__name__}(find_unused_parameters=True)`"
    remedy = remedy if name is None else f"`strategy='{name}'` or {remedy}"
    if "static_graph" in message:
        advice = (
            "The parameters that take part in the loss differ from those of the first backward pass, as with several"
            " optimizers under manual optimization that have a backward pass each. Omit `static_graph=True`, and use"
            f" {remedy}."
        )
    else:
        advice = f"Some parameters take no part in the loss of {step}. If this is intended, use {remedy}."
    advise(exception, advice)

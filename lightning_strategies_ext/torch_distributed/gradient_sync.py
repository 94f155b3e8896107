"""Configuration of the gradient exchange: DDP's arguments, communication hooks, compression, and model averaging.

:class:`GradientSyncOptions` holds the arguments of the user, and rejects invalid arguments when it is constructed. The
DDP strategies for the Trainer and for Fabric use it.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_strategies_ext.failure.failure_report import advise
from lightning_strategies_ext.registry import name_with
from lightning_strategies_ext.torch_distributed.bucket_search import AUTO
from lightning_strategies_ext.torch_distributed.compression.compressed_exchange import (
    CompressedExchange,
    create_exchange,
)
from lightning_strategies_ext.torch_distributed.compression.config import Compression, LocalSGD, PowerSGD, TopK
from lightning_strategies_ext.torch_distributed.compression.local_sgd import check_is_not_sharded
from lightning_strategies_ext.torch_distributed.gradient_exchange import Contribution, check_can_join
from lightning_strategies_ext.torch_distributed.wrapping import DDP_ARGUMENTS

_has_advised_static_graph = False


@dataclass
class GradientSyncOptions:
    """Arguments of the user for the gradient exchange, in addition to torch's own.

    Attributes:
        comm_state: First argument of the hook; a ``PostLocalSGDState`` selects post-local SGD.
        comm_hook: Hook ``hook(state, bucket) -> Future[Tensor]`` in place of DDP's all-reduce, on any backend.
        comm_wrapper: Callable that takes the hook and returns a hook, e.g. ``fp16_compress_wrapper``.
        averaging_period: Number of optimizer steps between two averagings of the models; with ``PostLocalSGDState``
            only.
        compression: Compression of the exchange, without a hook of the user.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the combination has no effect or no meaning.
    """

    comm_state: object | None = None
    comm_hook: Callable[..., Any] | None = None
    comm_wrapper: Callable[..., Any] | None = None
    averaging_period: int | None = None
    compression: Compression | None = None

    def __post_init__(self) -> None:
        self._check_hook()
        self._check_averaging()

    def check_compatible(self, ddp_kwargs: Mapping[str, Any], *, joins_uneven_inputs: bool = False) -> None:
        """Checks that the exchange can be combined with other arguments.

        Args:
            ddp_kwargs: Arguments of DistributedDataParallel.
            joins_uneven_inputs: Whether gradients are averaged over the ranks that have data.

        Raises:
            ValueError: If the exchange cannot be combined with one of the arguments.
        """
        if self.compression is not None:
            asked_for = f"`compression={self.compression!r}`"
            if self.comm_hook is not None:
                raise ValueError(
                    f"{asked_for} and `ddp_comm_hook={self.comm_hook!r}` both exchange the gradients. Leave one out."
                )
            for name in ("process_group", "device_mesh"):
                if ddp_kwargs.get(name) is not None:
                    raise ValueError(
                        f"{asked_for} is an exchange among all ranks, and `{name}` is for one among some. Leave one of"
                        " them out."
                    )
            if isinstance(self.compression, (PowerSGD, TopK)) and ddp_kwargs.get("find_unused_parameters"):
                raise ValueError(
                    f"{asked_for} sends with a step's gradients what was left out of earlier ones, which DDP drops for"
                    " parameters that no rank has used, with `find_unused_parameters=True`. Leave that out, or use the"
                    " compression 'bf16' or 'fp16'."
                )
        if joins_uneven_inputs:
            check_can_join(self.model_averaging_argument, ddp_kwargs)

    @property
    def model_averaging_argument(self) -> str | None:
        """Argument by which models are averaged, not gradients, with its value; None if there is none."""
        if self.averaging_period is not None:
            return f"model_averaging_period={self.averaging_period}"
        return f"compression={self.compression!r}" if isinstance(self.compression, LocalSGD) else None

    def begin_compression(
        self, model: DistributedDataParallel, timeout: timedelta | None = None
    ) -> CompressedExchange | None:
        """Returns the compressed exchange of a model; None if there is none. Collective: all ranks call it.

        Args:
            model: Model in DDP.
            timeout: Timeout of its collectives; torch's default if None.
        """
        return None if self.compression is None else create_exchange(self.compression, model, timeout)

    def register_hook(
        self,
        model: DistributedDataParallel,
        exchange: CompressedExchange | None = None,
        share: Contribution | None = None,
    ) -> None:
        """Makes ``model`` exchange its gradients through the communication hook, if there is one.

        Args:
            model: Model in DDP that has no hook.
            exchange: Exchange that :meth:`begin_compression` has returned.
            share: Contribution of this rank, if it may be nothing; else None.
        """
        hook = self.comm_hook
        if exchange is not None:
            hook = exchange.hook
        elif hook is not None:
            hook = hook if self.comm_wrapper is None else self.comm_wrapper(hook)
            hook = hook if model.device.type == "cuda" else _renamed(hook)
        if share is not None:
            hook = share.hook(hook, model.process_group)
        if hook is not None:
            model.register_comm_hook(state=self.comm_state, hook=hook)

    def average_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Averages parameters over all ranks, if the models may differ. Collective: all ranks call it.

        Args:
            parameters: Parameters, the same on all ranks.
        """
        if self.model_averaging_argument is not None:
            for parameter in parameters:
                dist.all_reduce(parameter.detach().div_(dist.get_world_size()))

    def create_averaging(self, optimizers: Iterable[Optimizer], num_local_ranks: int) -> "ModelAveraging | None":
        """Returns the model averaging of post-local SGD; None if the user has not selected it.

        Args:
            optimizers: Torch optimizers.
            num_local_ranks: Number of ranks per host, which still exchange gradients if the state specifies no group.

        Raises:
            ValueError: If an optimizer distributes its own work.
        """
        if not isinstance(self.comm_state, PostLocalSGDState):
            return None
        assert self.averaging_period is not None
        if self.comm_state.subgroup is None and self.comm_state.post_local_gradient_allreduce:
            # torch would create groups of as many ranks as the host has GPUs, which is zero on a CPU host.
            self.comm_state.subgroup, _ = dist.new_subgroups(group_size=num_local_ranks)
        return ModelAveraging(optimizers, self.averaging_period, self.comm_state)

    def _check_hook(self) -> None:
        for name, argument in (("ddp_comm_hook", self.comm_hook), ("ddp_comm_wrapper", self.comm_wrapper)):
            if argument is not None and not callable(argument):
                raise TypeError(f"`{name}` must be callable, got {argument!r}.")
        if self.comm_hook is None:
            for name, value in (("ddp_comm_state", self.comm_state), ("ddp_comm_wrapper", self.comm_wrapper)):
                if value is not None:
                    raise ValueError(
                        f"`{name}={value!r}` was given without `ddp_comm_hook`, which is what would use it. Give the"
                        " hook as well, or neither."
                    )
            return
        _check_hook_signature("ddp_comm_hook", self.comm_hook)
        if self.comm_wrapper is not None:
            wrapped = self.comm_wrapper(self.comm_hook)
            if not callable(wrapped):
                raise TypeError(f"`ddp_comm_wrapper` must return a communication hook, it returned {wrapped!r}.")
            _check_hook_signature("ddp_comm_wrapper(ddp_comm_hook)", wrapped)

    def _check_averaging(self) -> None:
        period, has_state = self.averaging_period, isinstance(self.comm_state, PostLocalSGDState)
        if has_state and period is None:
            raise ValueError(
                "`ddp_comm_state` is a PostLocalSGDState, which lets models drift apart, and `model_averaging_period`"
                " is missing. Give the number of optimizer steps between two averagings, e.g."
                " `model_averaging_period=4`."
            )
        if period is None:
            return
        if not isinstance(period, int) or isinstance(period, bool) or period < 1:
            raise ValueError(f"`model_averaging_period` must be a positive integer, got {period!r}.")
        if not has_state:
            raise ValueError(
                f"`model_averaging_period={period}` needs `ddp_comm_state` to be a PostLocalSGDState, got"
                f" {self.comm_state!r}; without it gradients are exchanged in every step and models never differ."
            )


class ModelAveraging:
    """Averages the parameters of each optimizer over ranks, each time after a number of steps of that optimizer.

    The schedule is post-local SGD's (Lin et al. 2020, https://arxiv.org/abs/1808.07217): gradients are exchanged
    in the first ``start_localSGD_iter`` steps, afterwards only models, periodically.

    Args:
        optimizers: Torch optimizers.
        period: Number of steps of an optimizer between two averagings.
        state: State that defines when averaging starts.

    Raises:
        ValueError: If an optimizer distributes its own work and would undo the averaging.
    """

    def __init__(self, optimizers: Iterable[Optimizer], period: int, state: PostLocalSGDState) -> None:
        self._averagers: dict[int, PeriodicModelAverager] = {}
        for optimizer in optimizers:
            check_is_not_sharded(optimizer, f"model_averaging_period={period}")
            # One averager per optimizer: a shared averager would count the steps of all optimizers together, and never
            # average some of them.
            self._averagers[id(optimizer)] = PeriodicModelAverager(
                period=period, warmup_steps=state.start_localSGD_iter, process_group=state.process_group
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """Counts a step of ``optimizer`` and averages its parameters if an averaging is due."""
        averager = self._averagers.get(id(optimizer))
        if averager is not None:
            averager.average_parameters(
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.requires_grad
            )


def check_ddp_kwargs(ddp_kwargs: dict[str, Any], *, may_search: bool = False) -> None:
    """Checks the arguments of DistributedDataParallel before processes start, instead of in each process.

    Args:
        ddp_kwargs: Arguments of DistributedDataParallel.
        may_search: Whether the caller supports a bucket-size search.

    Raises:
        TypeError: If DDP has no such argument, or an argument has the wrong type.
        ValueError: If a value is invalid.
    """
    unknown = sorted(set(ddp_kwargs) - DDP_ARGUMENTS)
    if unknown:
        raise TypeError(
            f"Unknown argument {', '.join(f'`{name}`' for name in unknown)}: neither the strategy nor"
            f" DistributedDataParallel takes it. DistributedDataParallel takes {', '.join(sorted(DDP_ARGUMENTS))}."
        )
    cap = ddp_kwargs.get("bucket_cap_mb")
    if cap is None or (cap == AUTO and may_search):
        return
    if cap == AUTO:
        raise ValueError(f"`bucket_cap_mb={AUTO!r}`: only the Trainer's `fit` tries sizes. Set a number of mebibytes.")
    if not isinstance(cap, (int, float)):
        by_name = f" or {AUTO!r}" if may_search else ""
        raise TypeError(f"`bucket_cap_mb` must be a number (mebibytes){by_name}, got {cap!r}.")
    if not cap > 0:
        raise ValueError(f"`bucket_cap_mb` must be positive (mebibytes), got {cap!r}.")


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
            "Every training step used the same parameters in the same order, so DDP need not search for unused ones in"
            f" each step: `strategy={strategy_name}(static_graph=True)` does it once. (Said once.)"
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
    beginnings = ("Expected to have finished reduction in the prior", "Your training graph has changed")
    if not isinstance(message, str):
        return
    if message.startswith("Expected sparse gradient to be defined"):
        advise(
            exception,
            f"The sparse gradient of an embedding is missing: it takes no part in the loss of {step}, and DDP's"
            " `find_unused_parameters=True` finds dense parameters only. Use the embedding in each backward pass, or"
            " leave `sparse=True` out.",
        )
        return
    if not message.startswith(beginnings):
        return
    if "`find_unused_parameters=True` is enabled" in message:  # torch's message contains the advice
        return
    name = name_with(type(strategy), start_method=strategy._start_method, find_unused_parameters=True)
    remedy = f"`{type(strategy).__name__}(find_unused_parameters=True)`"
    remedy = remedy if name is None else f"`strategy='{name}'` or {remedy}"
    if "static_graph" in message:
        advice = (
            "The parameters that take part in the loss are not those of the first backward pass, as with several"
            " optimizers under manual optimization that have a backward pass each. Leave `static_graph=True` out, and"
            f" use {remedy}."
        )
    else:
        advice = f"Some parameters take no part in the loss of {step}. If this is intended, use {remedy}."
    advise(exception, advice)


def _renamed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the hook under another name: torch rejects its bf16 hooks, by name, unless it was built with NCCL.

    gloo also reduces bfloat16 (torch 2.5 to 2.13).
    """

    def exchange(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        return future

    return exchange


def _check_hook_signature(name: str, hook: Callable[..., Any]) -> None:
    """Checks what torch would check when the hook is registered, after the processes have started."""
    expected = "`def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]`"
    try:
        signature = inspect.signature(hook)
        signature.bind(None, bucket=None)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be of the form {expected}; got {hook!r}: {error}.") from None
    bucket, returned = signature.parameters.get("bucket"), signature.return_annotation
    if bucket is None:
        raise TypeError(f"`{name}` must be of the form {expected}: its second parameter must be called `bucket`.")
    if bucket.annotation not in (inspect.Parameter.empty, dist.GradBucket):
        raise TypeError(f"`{name}` must be of the form {expected}; `bucket` is annotated {bucket.annotation!r}.")
    if returned not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]):
        raise TypeError(f"`{name}` must be of the form {expected}; it is annotated to return {returned!r}.")

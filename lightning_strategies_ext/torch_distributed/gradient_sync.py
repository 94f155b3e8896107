"""Configuration of the gradient exchange: DDP's arguments, communication hooks, compression, and model averaging.

:class:`GradientSyncOptions` holds the arguments of the user, and rejects invalid arguments when it is constructed. The
DDP strategies for the Trainer and for Fabric use it.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_strategies_ext.torch_distributed.compression.config import (
    BFloat16,
    Compression,
    Float16,
    LocalSGD,
    PowerSGD,
    TopK,
)
from lightning_strategies_ext.torch_distributed.gradient_exchange import check_can_join


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
        tunes_buckets: Whether the bucket size is searched.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the combination has no effect or no meaning.
    """

    comm_state: object | None = None
    comm_hook: Callable[..., Any] | None = None
    comm_wrapper: Callable[..., Any] | None = None
    averaging_period: int | None = None
    compression: Compression | None = None
    tunes_buckets: bool = False

    def __post_init__(self) -> None:
        self._check_hook()
        self._check_averaging()

    def cheaper_compressions(self, *, is_elastic: bool = False) -> tuple[str, ...]:
        """Returns the names of compressions that would reduce the size of exchanges.

        Args:
            is_elastic: Whether ranks may change during training, which excludes models that differ.
        """
        if self.compression is None and self.comm_hook is None:
            names = ["bf16", "powersgd", "localsgd"]
        else:
            names = ["powersgd", "localsgd"] if isinstance(self.compression, (BFloat16, Float16)) else []
        return tuple(name for name in names if name != "localsgd" or not is_elastic)

    def check_compatible(self, ddp_kwargs: Mapping[str, Any], *, joins_uneven_inputs: bool = False) -> None:
        """Checks that the exchange can be combined with other arguments.

        Args:
            ddp_kwargs: Arguments of DistributedDataParallel.
            joins_uneven_inputs: Whether gradients are averaged over the ranks that have data.

        Raises:
            ValueError: If the exchange cannot be combined with one of the arguments.
        """
        if self.compression is not None:
            compression_text = f"`compression={self.compression!r}`"
            if self.comm_hook is not None:
                raise ValueError(
                    f"{compression_text} and `ddp_comm_hook={self.comm_hook!r}` both exchange the gradients. Omit"
                    " one of the two."
                )
            for name in ("process_group", "device_mesh"):
                if ddp_kwargs.get(name) is not None:
                    raise ValueError(
                        f"{compression_text} exchanges among all ranks, but `{name}` exchanges among some. Omit one of"
                        " the two."
                    )
            if isinstance(self.compression, (PowerSGD, TopK)) and ddp_kwargs.get("find_unused_parameters"):
                raise ValueError(
                    f"{compression_text} adds what earlier steps left out to the gradients of a step. With"
                    " `find_unused_parameters=True`, DDP drops this for parameters that no rank has used. Omit that"
                    " argument, or use the compression 'bf16' or 'fp16'."
                )
        if joins_uneven_inputs:
            check_can_join(self.model_averaging_argument, ddp_kwargs)

    @property
    def model_averaging_argument(self) -> str | None:
        """Argument by which models are averaged, not gradients, with its value; None if there is none."""
        if self.averaging_period is not None:
            return f"model_averaging_period={self.averaging_period}"
        return f"compression={self.compression!r}" if isinstance(self.compression, LocalSGD) else None

    def keeps_models_equal(self, ddp_kwargs: Mapping[str, Any]) -> bool:
        """Returns whether all ranks have the same model after each step: they exchange gradients, and among all ranks.

        Args:
            ddp_kwargs: Arguments of DistributedDataParallel.
        """
        exchanges_among_some = any(ddp_kwargs.get(name) is not None for name in ("process_group", "device_mesh"))
        return self.model_averaging_argument is None and not exchanges_among_some

    def _check_hook(self) -> None:
        for name, argument in (("ddp_comm_hook", self.comm_hook), ("ddp_comm_wrapper", self.comm_wrapper)):
            if argument is not None and not callable(argument):
                raise TypeError(f"`{name}` must be callable, got {argument!r}.")
        if self.comm_hook is None:
            for name, value in (("ddp_comm_state", self.comm_state), ("ddp_comm_wrapper", self.comm_wrapper)):
                if value is not None:
                    raise ValueError(
                        f"`{name}={value!r}` requires `ddp_comm_hook`. Pass the hook as well, or omit both."
                    )
            return
        _check_hook_signature("ddp_comm_hook", self.comm_hook)
        if self.comm_wrapper is not None:
            wrapped = self.comm_wrapper(self.comm_hook)
            if not callable(wrapped):
                raise TypeError(f"`ddp_comm_wrapper` must return a communication hook, but returned {wrapped!r}.")
            _check_hook_signature("ddp_comm_wrapper(ddp_comm_hook)", wrapped)

    def _check_averaging(self) -> None:
        period, has_state = self.averaging_period, isinstance(self.comm_state, PostLocalSGDState)
        if has_state and period is None:
            raise ValueError(
                "`ddp_comm_state` is a PostLocalSGDState, which lets the models of the ranks differ, but"
                " `model_averaging_period` is missing. Pass the number of optimizer steps between two averagings, for"
                " example `model_averaging_period=4`."
            )
        if period is None:
            return
        if not isinstance(period, int) or isinstance(period, bool) or period < 1:
            raise ValueError(f"`model_averaging_period` must be a positive integer, got {period!r}.")
        if not has_state:
            raise ValueError(
                f"`model_averaging_period={period}` requires `ddp_comm_state` to be a PostLocalSGDState, got"
                f" {self.comm_state!r}. Without it, gradients are exchanged in every step and models never differ."
            )


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

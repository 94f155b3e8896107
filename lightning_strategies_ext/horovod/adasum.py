"""Adasum over Horovod: combines the parameter updates of the ranks' optimizers instead of their gradients."""

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_strategies_ext.horovod.exchange_options import HorovodExchangeOptions
from lightning_strategies_ext.horovod.gradient_exchange import exchanged_parameters
from lightning_strategies_ext.horovod.synchronize import synchronize
from lightning_strategies_ext.monitoring.observer import ExchangeObserver


class AdasumExchange:
    """Combines the parameter updates of the ranks' optimizers with Adasum (Maleki et al., 2020).

    Args:
        module: Module with the parameters.
        options: Options of the exchange.

    Raises:
        RuntimeError: If this Horovod has no Adasum, or the number of ranks is not a power of two.
    """

    def __init__(self, module: Module, options: HorovodExchangeOptions) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        self._exchanged = {parameter for _, parameter in exchanged_parameters(module)}
        self._process_set = hvd.global_process_set if options.process_set is None else options.process_set
        self._is_compressed = options.compression == "fp16"
        #: Records each exchange, or None.
        self.observer: ExchangeObserver | None = None
        size = self._process_set.size()
        if not hvd.mpi_enabled() and not hvd.nccl_built():
            raise RuntimeError(
                "`op='adasum'` requires Horovod over MPI. Start the ranks with `mpirun` (or `horovodrun --mpi`), with"
                " a Horovod that was built by `python -m lightning_strategies_ext install-horovod --mpi`."
            )
        if size & (size - 1):
            raise RuntimeError(
                f"`op='adasum'` requires 1, 2, 4, 8, ... ranks, but there are {size}. Change the number of ranks,"
                " or use another `op`."
            )

    @contextmanager
    def wrap_step(self, optimizer: Optimizer) -> Generator[None, None, None]:
        """Replaces the update of a step of the optimizer in the context with the combined update of all ranks."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        moved = [
            torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
            for parameter in parameters
            if parameter.requires_grad and parameter in self._exchanged
        ]
        starts = [values.clone() for values in moved]
        yield
        if not self._process_set.included():
            return
        deltas = [values - start for values, start in zip(moved, starts, strict=True)]
        wires = [delta.to(torch.float16) if self._is_compressed else _summable(delta) for delta in deltas]
        begun_at_ns = 0 if self.observer is None else time.time_ns()
        handles = [
            self._hvd.allreduce_async_(wire, name=f"delta.{index}", op=self._hvd.Adasum, process_set=self._process_set)
            for index, wire in enumerate(wires)
        ]
        for values, start, wire, handle in zip(moved, starts, wires, handles, strict=True):
            synchronize(handle)
            values.copy_(start + wire.to(start.dtype))
        if self.observer is not None:
            num_bytes = sum(wire.nbytes for wire in wires)
            self.observer.on_exchange(begun_at_ns, begun_at_ns, time.time_ns(), num_bytes)


def _summable(tensor: Tensor) -> Tensor:
    """Returns a tensor with a dtype that Horovod sums."""
    return tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor

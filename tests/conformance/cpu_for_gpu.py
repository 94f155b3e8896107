"""Lets torch's cases that require GPUs run on the CPU: modules and tensors are not moved to a GPU.

Most of torch's cases of DistributedDataParallel are written for GPUs, but hardly depend on GPUs. Here,
``model.cuda(rank)`` returns the model itself, and ``device_ids=[rank]`` is ignored, so that the cases can use gloo and
``shm``. A case that needs a GPU for other reasons fails over gloo, and does not count.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

_CPU = torch.device("cpu")


def allow() -> None:
    """Replaces torch's checks for GPUs. Call this before the cases are imported."""
    common_distributed.skip_if_lt_x_gpu = lambda count, **_: _on_cpu
    common_distributed.skip_if_no_gpu = _on_cpu
    # The check of subgroups requires eight ranks, because each rank would have a GPU.
    common_distributed.skip_if_small_worldsize = lambda case: case


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def case(*args: Any, **kwargs: Any) -> Any:
        with _tensors_on_cpu():
            return function(*args, **kwargs)

    return case


@contextmanager
def _tensors_on_cpu() -> Iterator[None]:
    from torch.testing._internal.distributed import distributed_test

    make_ddp, to = DistributedDataParallel.__init__, Module.to

    def make_ddp_on_cpu(
        ddp: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        make_ddp(ddp, module, None, None, *args, **kwargs)

    def to_cpu(module: Module, *args: Any, **kwargs: Any) -> Module:
        return to(module, *map(_cpu_if_gpu, args), **{name: _cpu_if_gpu(value) for name, value in kwargs.items()})

    replacements: list[tuple[Any, str, Any]] = [
        (DistributedDataParallel, "__init__", make_ddp_on_cpu),
        (Module, "cuda", lambda module, device=None: module),
        (Module, "to", to_cpu),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device", lambda device: nullcontext()),
        (torch.cuda, "stream", lambda stream: nullcontext()),
        (torch.cuda, "Stream", lambda *args: _Stream()),
        (torch.cuda, "current_stream", lambda *args: _Stream()),
        (getattr(torch, "accelerator", None), "current_stream", lambda *args: _Stream()),
        (distributed_test, "init_multigpu_helper", lambda size, backend: {rank: [rank] for rank in range(size)}),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replacements:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(_TensorsOnCpu())
        yield


def _cpu_if_gpu(value: Any) -> Any:
    is_gpu = (
        (isinstance(value, torch.device) and value.type == "cuda")
        or (isinstance(value, str) and value.startswith("cuda"))
        or type(value) is int
    )
    return _CPU if is_gpu else value


class _Stream:
    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _TensorsOnCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0].clone()
        if function is torch.Tensor.to:
            args = (args[0], *map(_cpu_if_gpu, args[1:]))
        if "device" in kwargs:
            kwargs["device"] = _cpu_if_gpu(kwargs["device"])
        return function(*args, **kwargs)

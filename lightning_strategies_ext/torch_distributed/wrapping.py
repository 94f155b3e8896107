"""Wraps a module in DDP, and wraps it again with other bucket sizes or other trainable parameters."""

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Embedding, EmbeddingBag, Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from lightning_strategies_ext._system.gpu_sync import side_stream
from lightning_strategies_ext.torch_distributed.distributed_model import DistributedModel

#: Arguments of DistributedDataParallel that the strategy decides.
_SET_BY_STRATEGY = frozenset({"self", "module", "device_ids", "output_device"})
DDP_ARGUMENTS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters) - _SET_BY_STRATEGY
#: Value of ``bucket_cap_mb`` that requests a search.
AUTO = "auto"
#: Arguments with which DDP changes the module or its parameters, so that the module can be wrapped only once.
NOT_REWRAPPABLE = ("bucket_cap_mb_list", "delay_all_reduce_named_params", "mixed_precision")


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
            " DistributedDataParallel accepts it. DistributedDataParallel accepts"
            f" {', '.join(sorted(DDP_ARGUMENTS))}."
        )
    cap = ddp_kwargs.get("bucket_cap_mb")
    if cap is None or (cap == AUTO and may_search):
        return
    if cap == AUTO:
        raise ValueError(
            f"`bucket_cap_mb={AUTO!r}`: only the Trainer's `fit` can search for a size. Pass a size in mebibytes."
        )
    if not isinstance(cap, (int, float)):
        by_name = f" or {AUTO!r}" if may_search else ""
        raise TypeError(f"`bucket_cap_mb` must be a number (mebibytes){by_name}, got {cap!r}.")
    if not cap > 0:
        raise ValueError(f"`bucket_cap_mb` must be positive (mebibytes), got {cap!r}.")


def wrap_in_ddp(
    module: Module, device: torch.device, gradient_as_bucket_view: bool = True, **ddp_kwargs: Any
) -> DistributedModel:
    """Returns ``module`` wrapped in DDP. All ranks then have the weights of rank 0.

    The strategies pass the ``**kwargs`` of their constructors. LightningCLI finds the arguments of the installed DDP
    through that call and the call in this function, and offers them by name: its parser follows keyword arguments
    through the source, and omits arguments that a call sets.

    Args:
        module: Module to train.
        device: Device of this rank.
        gradient_as_bucket_view: Whether gradients are views of the exchanged buckets; otherwise DDP keeps every
            gradient twice.
        **ddp_kwargs: Further arguments of DistributedDataParallel.

    Raises:
        ValueError: If no parameter of the module requires a gradient.
    """
    check_has_trainable_parameters(module)
    with _stream_for_ddp(device):
        model = DistributedModel(
            module=module,
            device_ids=_device_ids(device),
            output_device=None,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **ddp_kwargs,
        )
    _copy_sparse_gradients(model)
    return model


def rewrap_in_ddp(model: DistributedDataParallel, device: torch.device, **ddp_kwargs: Any) -> None:
    """Initializes DDP again around the same module, in the same object. Collective: all ranks call it between passes.

    Each rank keeps its buffers; communication hooks must be registered again. From torch 2.7 on, nothing is broadcast.
    Earlier versions of DDP have no argument for that, and broadcast the weights of rank 0.

    Args:
        model: Model in DDP, with the same weights on all ranks.
        device: Device of this rank.
        **ddp_kwargs: Arguments of DistributedDataParallel.

    Raises:
        ValueError: If an argument of :data:`NOT_REWRAPPABLE` is set.
    """
    module = model.module
    for name in NOT_REWRAPPABLE:
        if ddp_kwargs.get(name) is not None:
            raise ValueError(
                f"The parameters of {type(module).__name__} that require gradients have changed since DDP wrapped it,"
                f" and DDP cannot wrap it again with `{name}={ddp_kwargs[name]!r}`. Omit that argument, or keep the"
                " same parameters trainable during the whole training."
            )
    # State that torch keeps for any module, such as hooks, and the flag that `no_sync` sets.
    module_attributes = vars(Module()).keys() - {"_parameters", "_buffers", "_modules"}
    module_state = {name: getattr(model, name) for name in (*module_attributes, "require_backward_grad_sync")}
    without_sync = {"init_sync": False} if "init_sync" in DDP_ARGUMENTS else {}
    buffers = [] if without_sync else [*module.buffers()]
    own = [buffer.detach().clone() for buffer in buffers]
    # A private name of torch (2.5 to 2.13). Without this call, the hooks of the old reducer would exchange each
    # gradient a second time, until its last reference is dropped.
    model._remove_autograd_hooks()
    arguments = {"gradient_as_bucket_view": True, **ddp_kwargs, **without_sync}
    with _stream_for_ddp(device):
        DistributedDataParallel.__init__(model, module, device_ids=_device_ids(device), **arguments)
    vars(model).update(module_state)
    _copy_sparse_gradients(model)
    with torch.no_grad():
        for buffer, before in zip(buffers, own, strict=True):
            buffer.copy_(before)


def _copy_sparse_gradients(model: DistributedDataParallel) -> None:
    """Copies sparse gradients to separate memory before DDP averages them.

    The values of an embedding's sparse gradient share memory with the gradient of the embedding's output. DDP and
    communication hooks divide them in place (torch 2.5 to 2.13). Layers before the embedding's output, whose backward
    pass reads that memory later, would get gradients that are too small by a factor of the number of ranks.
    """
    ignored = model.parameters_to_ignore
    for name, module in model.module.named_modules():
        if not isinstance(module, (Embedding, EmbeddingBag)) or not module.sparse or not module.weight.requires_grad:
            continue
        if (f"{name}.weight" if name else "weight") not in ignored:
            # The reducer owns this node, so the hook exists as long as the reducer.
            get_gradient_edge(module.weight).node.register_prehook(_copied)


def _copied(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(each.clone() if each is not None and each.is_sparse else each for each in gradients)


def records_graph(model: DistributedDataParallel) -> bool:
    """Returns whether DDP records a static graph in the next backward pass, which must exchange gradients then.

    The flag is a private name of DDP (torch 2.5 to 2.13). It is reset when DDP is created or initialized again.
    """
    return model.static_graph and not model._static_graph_delay_allreduce_enqueued


class BackwardPasses:
    """Makes every backward pass through a model in DDP exchange gradients, after any number of forward passes.

    DDP's forward prepares the reducer for one backward pass. After two forward passes followed by two backward passes,
    the gradients of the second backward pass would stay local. This class detects a backward pass for which the reducer
    is not prepared when the pass reaches the output of the model, before it reaches a parameter, and then prepares the
    reducer.

    Args:
        model: Model in DDP.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._is_prepared = False
        self._pass = -1  # number of the last backward pass that reached the output
        model.register_forward_hook(self._after_forward)

    def _after_forward(self, model: Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        assert isinstance(model, DistributedDataParallel)
        is_exchanged: bool = model.require_backward_grad_sync
        self._is_prepared = self._is_prepared or is_exchanged

        def begin_pass(gradient: Tensor) -> None:
            number = torch._C._current_graph_task_id()  # a private name of torch (2.5 to 2.13)
            if number == self._pass:
                return
            self._pass = number
            if (model.find_unused_parameters or model.static_graph) and not _accumulates_in(model):
                return
            if is_exchanged and not self._is_prepared:
                _prepare(model)
            self._is_prepared = False

        for tensor in [output] if isinstance(output, Tensor) else tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(begin_pass)


def _prepare(model: DistributedDataParallel) -> None:
    """Prepares the reducer for a backward pass that has begun, as DDP's forward does."""
    if model.find_unused_parameters or model.static_graph:
        name = "find_unused_parameters" if model.find_unused_parameters else "static_graph"
        raise RuntimeError(
            f"`{name}=True`: two forward passes were followed by two backward passes, but DDP can exchange the"
            f" gradients of only one of them. Omit `{name}`, run each backward pass before the next forward pass, or"
            " run one backward pass of the sum of the losses."
        )
    model.require_forward_param_sync = True
    if isinstance(model, DistributedModel) and model.direct_exchange is not None and model.is_exchanged_directly:
        model.direct_exchange.expect_pass()
        return
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward([])


def _accumulates_in(model: DistributedDataParallel) -> bool:
    """Returns whether the current backward pass accumulates gradients in parameters; ``torch.autograd.grad`` does not.

    This matters only with ``find_unused_parameters`` and ``static_graph``: otherwise the reducer can be prepared twice.
    """
    nodes = (get_gradient_edge(each).node for each in model.parameters() if each.requires_grad)
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # `torch.autograd.grad` with respect to a parameter
        return False


def check_has_trainable_parameters(module: Module) -> None:
    """Checks that a module has a gradient to exchange.

    Raises:
        ValueError: If no parameter requires a gradient.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            f"No parameter of {type(module).__name__} requires a gradient, so there is nothing to train. Unfreeze"
            " some (`parameter.requires_grad_()`) in `__init__`, `configure_model` or `setup`, or use `validate`,"
            " `test` or `predict`."
        )


@contextmanager
def _stream_for_ddp(device: torch.device) -> Generator[None, None, None]:
    """Switches to a side stream on a GPU, where DDP must be created for later CUDA graphs (torch's CUDA notes).

    DDP reads and, before torch 2.7, overwrites the module in the side stream. The current stream may still execute the
    previous optimizer step, and executes the next forward pass afterwards, so each of the two streams waits for the
    other.
    """
    if device.type != "cuda":
        yield
        return
    current, side = torch.cuda.current_stream(device), side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


def _device_ids(device: torch.device) -> list[int | None] | None:
    return None if device.type == "cpu" else [device.index]

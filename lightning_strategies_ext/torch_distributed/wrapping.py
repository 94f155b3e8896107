"""Wraps a module in DDP, and wraps it again with other bucket sizes or other trainable parameters.

torch's DDP exchanges the gradients of the parameters that require a gradient when it is created. A parameter that is
unfrozen later, as in gradual unfreezing, is trained by each rank alone, silently, and the models of the ranks diverge.
For a parameter that is frozen later, DDP waits for a gradient that is never computed.
:class:`TrainableParameterTracker` detects both before the next forward pass.
"""

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import attrgetter, not_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Embedding, EmbeddingBag, Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from lightning_strategies_ext._system.gpu_sync import side_stream
from lightning_strategies_ext.torch_distributed.direct_exchange import exchanged_parameters
from lightning_strategies_ext.torch_distributed.distributed_model import DistributedModel

#: Arguments of DistributedDataParallel that the strategy decides.
_DECIDED_HERE = frozenset({"self", "module", "device_ids", "output_device"})
DDP_ARGUMENTS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters) - _DECIDED_HERE
#: Arguments with which DDP changes the module or its parameters, so that the module can be wrapped only once.
NOT_REWRAPPABLE = ("bucket_cap_mb_list", "delay_all_reduce_named_params", "mixed_precision")

_needs_gradient: Callable[[Tensor], bool] = attrgetter("requires_grad")


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
                f"Other parameters of {type(module).__name__} need gradients than when DDP wrapped it. DDP cannot wrap"
                f" it again with `{name}={ddp_kwargs[name]!r}`. Omit that argument, or let the same parameters need"
                " gradients during the whole training."
            )
    # State that torch keeps for any module, such as hooks, and the flag that `no_sync` sets.
    of_modules = vars(Module()).keys() - {"_parameters", "_buffers", "_modules"}
    kept = {name: getattr(model, name) for name in (*of_modules, "require_backward_grad_sync")}
    without_sync = {"init_sync": False} if "init_sync" in DDP_ARGUMENTS else {}
    buffers = [] if without_sync else [*module.buffers()]
    own = [buffer.detach().clone() for buffer in buffers]
    # A private name of torch (2.5 to 2.13). Without this call, the hooks of the old reducer would exchange each
    # gradient a second time, until its last reference is dropped.
    model._remove_autograd_hooks()
    arguments = {"gradient_as_bucket_view": True, **ddp_kwargs, **without_sync}
    with _stream_for_ddp(device):
        DistributedDataParallel.__init__(model, module, device_ids=_device_ids(device), **arguments)
    vars(model).update(kept)
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


class TrainableParameterTracker:
    """Checks before each forward pass with gradients whether other parameters require gradients than DDP exchanges.

    A copy of the model in DDP is not checked.

    Args:
        model: Model in DDP.
        on_change: Callable that initializes DDP again, in ``model``. All ranks call it together, with the model and the
            parameters that were trained so far.
    """

    _parameters: Mapping[str, Tensor] = {}
    _are_trained: Sequence[bool] = ()
    _unknown: Mapping[str, Tensor] = {}

    def __init__(
        self,
        model: DistributedDataParallel,
        on_change: Callable[[DistributedDataParallel, Sequence[Tensor]], None],
    ) -> None:
        self._parameters = exchanged_parameters(model)
        self._note(self._need_gradients())
        self._on_change = on_change
        model.register_forward_pre_hook(self._before_forward)

    def find_added(self, model: DistributedDataParallel) -> list[Tensor]:
        """Returns the parameters that were added to the module, or have replaced others, since DDP was initialized."""
        known = {*map(id, self._parameters.values())}
        return [parameter for parameter in exchanged_parameters(model).values() if id(parameter) not in known]

    def follow_added(self, model: DistributedDataParallel) -> None:
        """Makes DDP exchange the gradients of added parameters. Collective: all ranks call it."""
        trained = self._chosen(self._are_trained)
        self._parameters = exchanged_parameters(model)
        self._note(self._need_gradients())
        self._on_change(model, trained)

    def check_none_unfrozen(self) -> None:
        """Checks that no parameter was unfrozen since the forward pass began.

        Raises:
            RuntimeError: If a parameter was unfrozen; each rank would train it alone.
        """
        name = next((name for name, each in self._unknown.items() if each.requires_grad), None)
        if name is not None:
            raise RuntimeError(
                f"The parameter `{name}` was unfrozen within the training step, and DDP has begun it without: each rank"
                " would train it alone. Unfreeze it before, in `on_train_epoch_start` or `on_train_batch_start` for"
                " example."
            )

    def _note(self, are_trained: Sequence[bool]) -> None:
        self._are_trained = are_trained
        self._unknown = dict(compress(self._parameters.items(), map(not_, are_trained)))

    def _need_gradients(self) -> Sequence[bool]:
        return [*map(_needs_gradient, self._parameters.values())]

    def _before_forward(self, model: Module, args: Any) -> None:
        # `model.training` is no criterion: after a validation, Lightning leaves DDP in evaluation mode, but not its
        # module.
        if not torch.is_grad_enabled():
            return
        before, now = self._are_trained, self._need_gradients()
        if now == before:
            return
        assert isinstance(model, DistributedDataParallel)
        if model.find_unused_parameters:  # DDP treats frozen parameters as unused: losses may alternate
            now = [was or needs for was, needs in zip(before, now, strict=True)]
        if now == before or not any(now):  # if no parameter is trained, DDP waits for none
            return
        self._note(now)
        trained = self._chosen(before)
        unused = [each for each in self._chosen(now) if not each.requires_grad]
        for parameter in unused:
            parameter.requires_grad_()
        self._on_change(model, trained)
        for parameter in unused:
            parameter.requires_grad_(False)

    def _chosen(self, are_chosen: Sequence[bool]) -> list[Tensor]:
        return [*compress(self._parameters.values(), are_chosen)]

    def __getstate__(self) -> dict[str, Any]:
        return {}


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
            f"`{name}=True`: two forward passes were followed by two backward passes, and DDP can exchange the"
            f" gradients of one of them only. Leave out `{name}`, run each backward pass before the next forward"
            " pass, or run one backward pass of the sum of the losses."
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
            f"No parameter of {type(module).__name__} needs a gradient, so there is nothing to train. Unfreeze some"
            " (`parameter.requires_grad_()`) in `__init__`, `configure_model` or `setup`, or use `validate`, `test` or"
            " `predict`."
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

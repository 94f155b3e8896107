"""Features for manual optimization, in which the user runs backward passes within DDP's forward."""

import lightning.pytorch as pl
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_strategies_ext.torch_distributed.distributed_model import DistributedModel
from lightning_strategies_ext.torch_distributed.feature import Feature
from lightning_strategies_ext.torch_distributed.wrapping import records_graph


def prepare_pass(model: DistributedDataParallel, loss: Tensor) -> None:
    """Makes the next backward pass of a model in DDP exchange gradients, after a forward that has not prepared it."""
    if isinstance(model, DistributedModel) and model.is_exchanged_directly:
        model.prepare_for_backward()
    else:
        prepare_for_backward(model, loss)


class ManualOptimization(Feature):
    """Prepares DDP for each backward pass.

    Args:
        module: Module whose attribute ``automatic_optimization`` is False in steps with manual optimization.
    """

    def __init__(self, module: "pl.LightningModule") -> None:
        self._module = module
        self._model: DistributedDataParallel | None = None

    @staticmethod
    def create(module: "pl.LightningModule | None", model: DistributedDataParallel) -> "ManualOptimization":
        """Returns the feature for a LightningModule whose model is in DDP."""
        assert module is not None
        return (StaticGraph if model.static_graph else ManualOptimization)(module)

    @override
    def wrap(self, model: DistributedDataParallel) -> None:
        self._model = model

    @override
    def before_backward(self, loss: Tensor) -> None:
        model = self._model
        if model is None or self._module.automatic_optimization:
            return
        prepare_pass(model, loss)

    @override
    def close(self) -> None:
        self._model = None


class StaticGraph(ManualOptimization):
    """Exchanges the gradients of the first backward pass of a static graph, in which DDP records the graph.

    DDP starts this exchange from the output of its forward, which does not exist yet in a manual backward pass.
    """

    @override
    def before_backward(self, loss: Tensor) -> None:
        super().before_backward(loss)
        model = self._model
        if model is None or self._module.automatic_optimization or not records_graph(model) or not loss.requires_grad:
            return

        # At the end of the backward pass, so that `on_after_backward` receives averaged gradients.
        def queue(_: Tensor) -> None:
            if records_graph(model):
                Variable._execution_engine.queue_callback(model.reducer._delay_all_reduce)  # type: ignore[attr-defined]
                model._static_graph_delay_allreduce_enqueued = True

        loss.register_hook(queue)

    @override
    def after_backward(self) -> None:
        # Needed if the user's `backward` has computed the gradients of another loss.
        model = self._model
        if model is None or self._module.automatic_optimization or not records_graph(model):
            return
        model.reducer._delay_all_reduce()  # type: ignore[attr-defined]
        model._static_graph_delay_allreduce_enqueued = True

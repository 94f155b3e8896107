"""The training of a cell with Fabric: the model of :mod:`.training` in a user's training loop."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn import functional

from tests.combinations.features import Setup
from tests.combinations.training import Net, batches_of, tensors_of
from tests.support.models import state_of


def train_under_fabric(setup: Setup, make_strategy: Callable[[], Any], devices: Any) -> dict[str, Any]:
    """Trains, and returns this rank's observations, as :func:`.training.train` does."""
    precision = setup.trainer.get("precision", "32-true")
    fabric = Fabric(accelerator="cpu", strategy=make_strategy(), devices=devices, precision=precision)
    fabric.launch()
    fabric.seed_everything(11, verbose=False)
    net = Net(setup)
    net.configure_model()
    before = state_of(net)
    configured = net.configure_optimizers()
    optimizers, schedulers = configured if isinstance(configured, tuple) else (configured, [])
    module = torch.compile(net, backend="eager") if "compiled" in setup.flags else net
    model, *wrapped = fabric.setup(module, *optimizers)
    every = 2 if "accumulation" in setup.flags else 1
    clip = {**setup.trainer, **setup.clip}
    num_steps = 0

    def backward(batch: Any) -> Tensor:
        features, labels, rows, index = fabric.to_device(batch)
        loss = functional.cross_entropy(model(features, rows, index), labels)
        fabric.backward(loss / every)
        return loss

    def closure(batch: Any) -> Tensor:
        for optimizer in wrapped:
            optimizer.zero_grad()
        return backward(batch)

    for _ in range(2):
        for number, batch in enumerate(batches_of(setup, fabric.global_rank, fabric.world_size)):
            if "lbfgs" in setup.flags:
                for optimizer in wrapped:
                    optimizer.step(lambda batch=batch: closure(batch))
                continue
            steps = (number + 1) % every == 0
            with fabric.no_backward_sync(model, enabled=not steps):
                backward(batch)
            if not steps:
                continue
            for optimizer in wrapped:
                if "gradient_clip_val" in clip:
                    name = "clip_val" if "gradient_clip_algorithm" in clip else "max_norm"
                    fabric.clip_gradients(model, optimizer, **{name: clip["gradient_clip_val"]})
                optimizer.step()
                optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler["scheduler"].step()
            num_steps += 1
    return {
        "before": before,
        "weights": state_of(net),
        "optimizers": [tensors_of(optimizer.state_dict()["state"]) for optimizer in optimizers],
        "lrs": [group["lr"] for optimizer in optimizers for group in optimizer.param_groups],
        "metrics": {},
        "steps": num_steps,
    }

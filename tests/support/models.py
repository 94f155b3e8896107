"""Models, data, and a training function for many tests.

trainer, model = fit("ddp_ext", TwoOptimizers, max_epochs=1)
assert_same_bits(state_of(model), weights_after("ddp", TwoOptimizers, max_epochs=1))
"""

import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

NUM_FEATURES = 8
NUM_CLASSES = 3


def dataset(num_samples: int = 64) -> TensorDataset:
    """Returns a random classification problem, identical in each call."""
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(num_samples, NUM_FEATURES, generator=generator)
    return TensorDataset(features, features[:, :NUM_CLASSES].argmax(dim=1))


def loader(num_samples: int = 64, batch_size: int = 4, **kwargs: Any) -> DataLoader:
    """Returns batches of :func:`dataset`, in order."""
    return DataLoader(dataset(num_samples), batch_size=batch_size, **kwargs)


class StatefulLoader(DataLoader):
    """A DataLoader with a state: its position, from which it continues."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.position = self.start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        return self.batches_from(start)

    def batches_from(self, start: int):
        for index, batch in enumerate(super().__iter__()):
            self.position = index + 1
            if index >= start:
                yield batch

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


class MLP(pl.LightningModule):
    """A model with two layers, and SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = self.make_net()

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class WithBatchNorm(MLP):
    """A model with buffers, which DDP keeps equal to those of rank 0."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, NUM_CLASSES))


class WithUnusedParameters(MLP):
    """A model with two heads, which steps use in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(NUM_CLASSES, NUM_CLASSES) for _ in range(2))

    def training_step(self, batch, batch_idx):
        logits = self.heads[batch_idx % 2](self.net(batch[0]))
        return functional.cross_entropy(logits, batch[1])


class ManualMLP(MLP):
    """A model under manual optimization; subclasses define the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(ManualMLP):
    """Manual optimization with an optimizer for each half of the model, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(NUM_CLASSES, NUM_CLASSES)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer, loss in ((first, self.loss), (second, self.other_loss)):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def other_loss(self, batch):
        return functional.cross_entropy(self.other(self.net(batch[0])), batch[1])

    def configure_optimizers(self):
        return (
            torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adam(self.other.parameters(), lr=0.01),
        )


#: For ``Trainer.fit(ckpt_path=...)``; Lightning 2.5 has no such argument and loads everything.
LOADS_EVERYTHING: dict[str, Any] = (
    {"weights_only": False} if "weights_only" in inspect.signature(pl.Trainer.fit).parameters else {}
)


def make_trainer(strategy: Any, devices: int = 2, **kwargs: Any) -> pl.Trainer:
    """Returns a Trainer on the CPU without logs."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": devices,
        "strategy": strategy,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": True,
    }
    return pl.Trainer(**{**defaults, **kwargs})


def fit(
    strategy: Any, make_model: Callable[[], pl.LightningModule] = MLP, devices: int = 2, **trainer_kwargs: Any
) -> tuple[pl.Trainer, pl.LightningModule]:
    """Trains a freshly seeded model and returns the Trainer and the model."""
    pl.seed_everything(11, verbose=False)
    model = make_model()
    trainer = make_trainer(strategy, devices, **trainer_kwargs)
    trainer.fit(model, loader())
    return trainer, model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns a copy of the weights and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def weights_after(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Returns the weights and buffers after :func:`fit`."""
    return state_of(fit(*args, **kwargs)[1])


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Fails unless both states have the same names and bitwise identical tensors."""
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Fails unless both states have the same names and close values."""
    torch.testing.assert_close(dict(found), dict(expected), rtol=tolerance, atol=tolerance)

"""The model of a fuzzed case, and the callback that records its hooks, its samples, and its state."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy as StockDDPStrategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_strategies_ext.torch_distributed import direct_exchange
from lightning_strategies_ext.torch_distributed.direct_exchange import LARGE_NUM_BYTES
from tests.fuzz.cases import Case
from tests.fuzz.data import NUM_TOKENS, WIDTH

CALLBACK_HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_")]
MODULE_HOOKS = [
    name
    for name in dir(pl.LightningModule)
    if name.startswith("on_") and name not in ("on_gpu", "on_save_checkpoint", "on_load_checkpoint")
]


class Block(nn.Module):
    """A part of the module, see :data:`~tests.fuzz.cases.BLOCKS`."""

    def __init__(self, kind: str, shared: nn.Linear) -> None:
        super().__init__()
        self.kind = kind
        self.layer = self._make(kind, shared)
        if kind == "frozen":
            self.layer.requires_grad_(False)
        if kind == "frozen_bias":
            self.layer.bias.requires_grad_(False)
        if kind == "buffer":
            self.register_buffer("num_steps", torch.zeros(()))
        if kind == "scalar":
            self.scalar = nn.Parameter(torch.ones(()))
        self.step = 0

    def _make(self, kind: str, shared: nn.Linear) -> Any:
        if kind in ("embedding", "sparse_embedding"):
            return nn.Embedding(NUM_TOKENS, WIDTH, sparse=kind == "sparse_embedding")
        makers: dict[str, Callable[[], nn.Module]] = {
            "conv": lambda: nn.Conv1d(1, 2, 3, padding=1),
            "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
            "nested": lambda: nn.Sequential(
                nn.Linear(WIDTH, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 5)), nn.Linear(5, WIDTH)
            ),
            "branch": lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]),
            "shared": lambda: shared,
            "dropout": lambda: nn.Dropout(0.3),
            "layer_norm": lambda: nn.LayerNorm(WIDTH),
            "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        }
        return makers.get(kind, lambda: nn.Linear(WIDTH, WIDTH))()

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.kind in ("embedding", "sparse_embedding"):
            return x + self.layer(tokens).mean(1)
        if self.kind == "conv":
            return x + self.layer(x[:, None]).mean(1)
        if self.kind == "branch":
            return x + self.layer[self.step % 2](x)
        if self.kind == "unused":
            return x
        if self.kind == "checkpointed":
            return x + checkpoint(self.layer, x, use_reentrant=False).tanh()
        if self.kind == "shared":
            return x + self.layer(self.layer(x).tanh())
        if self.kind == "buffer" and self.training:
            self.num_steps += 1
        if self.kind == "scalar":
            x = x * self.scalar
        return x + self.layer(x).tanh()


class Net(nn.Module):
    def __init__(self, blocks: tuple[str, ...]) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, shared) for kind in blocks)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor, tokens: Tensor, step: int) -> Tensor:
        x = self.first(features)
        for block in self.blocks:
            block.step = step
            x = block(x, tokens)
        return self.last(x)[:, 0]


class Model(pl.LightningModule):
    """The module of a case; `world_size` is the number of ranks whose samples a batch contains."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.net = Net(case.blocks)
        self.critic = nn.Linear(WIDTH, 1) if case.optimization == "two" else None
        self.automatic_optimization = case.optimization == "automatic"
        if case.log_metric:
            self.metric = MeanMetric()
        if case.unfreeze:
            self.net.first.requires_grad_(False)

    def read(self, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.case.data == "combined" and isinstance(batch, list | tuple) and len(batch) == 2:
            batch = batch[0] if batch[0] is not None else batch[1]
        if isinstance(batch, dict):
            return batch["index"], batch["features"], batch["tokens"], batch["target"]
        index, features, tokens, target = batch
        return index, features, tokens, target

    def loss(self, batch: Any, step: int) -> Tensor:
        _, features, tokens, target = self.read(batch)
        return nn.functional.mse_loss(self.net(features, tokens, step), target.to(features.dtype))

    def critic_loss(self, batch: Any) -> Tensor:
        assert self.critic is not None
        _, features, _, target = self.read(batch)
        return nn.functional.mse_loss(self.critic(features)[:, 0], target.to(features.dtype))

    def report(self, stage: str, loss: Tensor, batch: Any) -> None:
        case = self.case
        size = len(self.read(batch)[0])
        steps: dict[str, Any] = {"on_step": case.log_step, "on_epoch": case.log_epoch} if stage == "train" else {}
        # Lightning refuses this for a value that is logged in no way.
        self.log(f"{stage}_loss", loss, sync_dist=True, batch_size=size)
        if case.log_step or case.log_epoch:
            reduction = case.log_reduction
            self.log(f"{stage}_drawn", loss, sync_dist=case.log_synced, reduce_fx=reduction, batch_size=size, **steps)
        if case.log_metric:
            self.metric(loss.detach(), size)
            self.log(f"{stage}_metric", self.metric, on_step=False, on_epoch=True, batch_size=size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch, batch_idx)
        self.report("train", loss, batch)
        if self.automatic_optimization:
            return loss
        self.optimize(loss, batch, batch_idx)
        return None

    def optimize(self, loss: Tensor, batch: Any, batch_idx: int) -> None:
        case = self.case
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        steps = (batch_idx + 1) % case.accumulate == 0
        for number, optimizer in enumerate(optimizers):
            if len(optimizers) > 1:
                self.toggle_optimizer(optimizer)
                loss = self.loss(batch, batch_idx) if number == 0 else self.critic_loss(batch)
            self.manual_backward(loss / case.accumulate)
            if steps:
                if case.clip is not None:
                    self.clip_gradients(optimizer, gradient_clip_val=case.clip[1], gradient_clip_algorithm=case.clip[0])
                optimizer.step()
                optimizer.zero_grad()
            if len(optimizers) > 1:
                self.untoggle_optimizer(optimizer)
        schedulers = self.lr_schedulers()
        if steps and case.scheduler in ("step", "every_other_step"):
            for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                scheduler.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.report("val", self.loss(batch, batch_idx), batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.report("test", self.loss(batch, batch_idx), batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        index, features, tokens, _ = self.read(batch)
        return {"index": index, "value": self.net(features, tokens, 0)}

    def setup(self, stage: str) -> None:
        num_bytes = 0 if self.case.exchanges_each else LARGE_NUM_BYTES
        direct_exchange.LARGE_NUM_BYTES = num_bytes  # type: ignore[misc]
        if self.injects("gradient"):
            self._ddp_params_and_buffers_to_ignore = ["net.last.bias"]

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.injects("hook") and _recorder is not None:
            _recorder.hooks.pop()

    def injects(self, fault: str) -> bool:
        """Returns whether this process runs the strategy under test, with this fault."""
        return self.case.fault == fault and type(self.trainer.strategy) is not StockDDPStrategy

    def edit(self) -> None:
        for parameter in self.net.last.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5).clamp_(-0.1, 0.1)

    def on_after_backward(self) -> None:
        if self.case.edit_gradients == "on_after_backward":
            self.edit()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.case.edit_gradients == "on_before_optimizer_step":
            self.edit()

    def configure_optimizers(self) -> Any:
        modules = [self.net] if self.critic is None else [self.net, self.critic]
        optimizers = [self.optimizer_for(list(module.parameters())) for module in modules]
        schedulers = [self.scheduler_for(optimizer) for optimizer in optimizers if self.case.scheduler]
        return optimizers, schedulers

    def optimizer_for(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "sgd": lambda: torch.optim.SGD(parameters, lr=0.05),
            "momentum": lambda: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
            "adam": lambda: torch.optim.Adam(parameters, lr=0.005, eps=1e-3),
            "adamw": lambda: torch.optim.AdamW(parameters, lr=0.005, eps=1e-3),
            "adagrad": lambda: torch.optim.Adagrad(parameters, lr=0.02, eps=1e-3),
        }
        return makers[self.case.optimizer]()

    def scheduler_for(self, optimizer: torch.optim.Optimizer) -> Any:
        kind = self.case.scheduler
        if kind == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
            return {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch", "strict": False}
        frequency = 2 if kind == "every_other_step" else 1
        interval = "epoch" if kind == "epoch" else "step"
        return {
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7),
            "interval": interval,
            "frequency": frequency,
        }


#: Recorder of the stage that runs in this process.
_recorder: "Recorder | None" = None


class Recorder(pl.Callback):
    """A callback that records the order of hooks and the samples of batches, and writes both at the end of a stage."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.number = -1
        self.hooks: list[str] = []
        self.samples: list[tuple[str, list[int]]] = []

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        global _recorder
        self.hooks, self.samples = [], []
        _recorder = self

    def record(self, owner: str, name: str, args: tuple[Any, ...]) -> None:
        self.hooks.append(f"{owner}.{name}")
        if owner == "callback" and name.endswith("_batch_start"):
            self.samples.append((name, numbers_in(args[2])))

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        state = state_of(trainer, module)
        state |= {"hooks": self.hooks, "samples": self.samples}
        path = self.directory / f"stage-{self.number}.rank-{trainer.global_rank}"
        path.write_bytes(pickle.dumps(state))


def numbers_in(batch: Any) -> list[int]:
    """Returns the numbers of the samples of a batch."""
    if isinstance(batch, dict):
        return batch["index"].tolist()
    if isinstance(batch[0], Tensor):
        return batch[0].tolist()
    return [number for part in batch if part is not None for number in numbers_in(part)]


def _recording(name: str) -> Callable[..., Any]:
    def hook(self: Recorder, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.record("callback", name, (trainer, *args, *kwargs.values()))

    hook.__name__, hook.__qualname__ = name, f"Recorder.{name}"
    return hook


def _recording_module(name: str) -> Callable[..., Any]:
    original = getattr(Model, name)

    def hook(self: Model, *args: Any, **kwargs: Any) -> Any:
        if _recorder is not None:
            _recorder.record("module", name, ())
        return original(self, *args, **kwargs)

    hook.__name__, hook.__qualname__ = name, f"Model.{name}"
    return hook


for _name in CALLBACK_HOOKS:
    setattr(Recorder, _name, _recording(_name))
for _name in MODULE_HOOKS:
    setattr(Model, _name, _recording_module(_name))


def state_of(trainer: pl.Trainer, module: Any) -> dict[str, Any]:
    """Returns a copy of the state of a rank, as builtin types and tensors."""
    state = {
        "model": dict(module.state_dict()),
        "requires_grad": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callback_metrics": dict(trainer.callback_metrics),
        "logged_metrics": dict(trainer.logged_metrics),
        "progress": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
        "random": torch.get_rng_state(),
    }
    return pickle.loads(pickle.dumps(state))

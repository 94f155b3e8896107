"""Runs a :class:`~tests.fuzz.cases.Case` in this process, with our strategy or with its reference.

    results = run(case, "ours", directory)  # "stock": Lightning's `ddp`; "one": one device on the whole batch

Each rank writes a file at the end of each stage, `stage-STAGE.rank-RANK`: the state of the model, the optimizers, the
schedulers, and the random generator; the order of hooks; the samples of each batch.
"""

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy as StockDDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset
from torchmetrics import MeanMetric

from lightning_strategies_ext import DataParallelStrategy, DDPSpawnStrategy, DDPStrategy, HorovodStrategy
from lightning_strategies_ext.torch_distributed import direct_exchange
from lightning_strategies_ext.torch_distributed.direct_exchange import LARGE_NUM_BYTES
from tests.fuzz.cases import Case
from tests.support.models import LOADS_EVERYTHING

try:
    from lightning.pytorch.callbacks import EMAWeightAveraging
except ImportError:  # before Lightning 2.6
    EMAWeightAveraging = None

SEED = 11
WIDTH = 8
NUM_TOKENS = 20
CALLBACK_HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_")]
MODULE_HOOKS = [
    name
    for name in dir(pl.LightningModule)
    if name.startswith("on_") and name not in ("on_gpu", "on_save_checkpoint", "on_load_checkpoint")
]


@dataclass
class Results:
    """The results of a case in one process.

    Attributes:
        returned: What each stage returned.
        states: State of this process after each stage.
    """

    returned: list[Any] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)


class Samples(Dataset[Any]):
    """Dataset of random features, tokens, and targets, with the number of each sample."""

    def __init__(self, num_samples: int, container: str, dtype: torch.dtype, repeats_one: bool = False) -> None:
        self.repeats_one = repeats_one
        generator = torch.Generator().manual_seed(7)
        self.features = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        self.tokens = torch.randint(NUM_TOKENS, (num_samples, 3), generator=generator)
        self.container = container

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Any:
        index = max(index, int(self.repeats_one))
        features, tokens = self.features[index], self.tokens[index]
        target = features[:3].sum().sin()
        if self.container == "dict":
            return {"index": index, "features": features, "tokens": tokens, "target": target}
        return index, features, tokens, target


class Stream(IterableDataset[Any]):
    """A dataset that yields the samples of this rank. If the ranks are uneven, rank 0 has one batch less."""

    def __init__(self, samples: Samples, world_size: int, num_less: int) -> None:
        self.samples, self.world_size, self.num_less = samples, world_size, num_less

    def __iter__(self) -> Iterator[Any]:
        rank = _rank_now()
        share = len(self.samples) // self.world_size - (self.num_less if rank == 0 else 0)
        for position in range(share):
            yield self.samples[position * self.world_size + rank]


def _rank_now() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("HOROVOD_RANK", "0"))


class WholeBatches(BatchSampler):
    """A sampler that yields global batches, for training on one device."""

    def __init__(self, samplers: list[DistributedSampler[Any]], batch_size: int, drop_last: bool) -> None:
        super().__init__(samplers[0], batch_size, drop_last)
        self.sampler = self  # Lightning sets the epoch of the sampler
        self.samplers = samplers

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def _of_ranks(self) -> list[BatchSampler]:
        return [BatchSampler(sampler, self.batch_size, self.drop_last) for sampler in self.samplers]

    def __iter__(self) -> Iterator[list[int]]:
        for batches in zip(*self._of_ranks(), strict=True):
            yield [index for batch in batches for index in batch]

    def __len__(self) -> int:
        return len(self._of_ranks()[0])


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


class Unfreeze(pl.Callback):
    """A callback that unfreezes the first layer at the second epoch."""

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.net.first.requires_grad_(True)


class Kill(pl.Callback):
    """A callback that kills the process of rank 1, once."""

    def __init__(self, step: int, flag: Path) -> None:
        self.step, self.flag = step, flag

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == self.step and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


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


def loader(case: Case, kind: str, purpose: str) -> Any:
    training = purpose == "train"
    num_samples = case.num_samples if training else case.num_evaluation_samples
    dtype = torch.float64 if case.precision == "64-true" else torch.float32
    samples = Samples(num_samples, case.container, dtype, repeats_one=kind == "ours" and case.fault == "sample")
    if training and case.data == "iterable":
        num_less = case.batch_size if case.uneven else 0
        return DataLoader(
            Stream(samples, case.world_size, num_less), batch_size=case.batch_size, drop_last=case.drop_last
        )
    one = _map_loader(case, kind, samples, training)
    if training and case.data == "combined":
        # `dp_ext` splits a batch by the number of its samples, which must be the same in both of its parts.
        num_others = num_samples - (0 if case.strategy == "dp_ext" else 5)
        other = _map_loader(case, kind, Samples(num_others, case.container, dtype), training)
        return CombinedLoader([one, other], mode="max_size" if case.shuffle else "min_size")
    return one


def _map_loader(case: Case, kind: str, samples: Samples, training: bool) -> DataLoader[Any]:
    shuffle, drop_last = training and case.shuffle, training and case.drop_last
    if case.strategy == "dp_ext" or kind != "one" or not training:
        whole = case.strategy == "dp_ext" or kind == "one"
        batch_size = case.batch_size * (case.world_size if whole else 1)
        generator = torch.Generator().manual_seed(5) if case.strategy == "dp_ext" else None
        return DataLoader(samples, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, generator=generator)
    samplers = [
        DistributedSampler(samples, case.world_size, rank, shuffle=training, seed=SEED)  # as Lightning shards
        for rank in range(case.world_size)
    ]
    return DataLoader(samples, batch_sampler=WholeBatches(samplers, case.batch_size, drop_last))


def strategy_of(case: Case, kind: str) -> Any:
    if kind == "one":
        return "auto"
    common: dict[str, Any] = {}
    if case.strategy in ("ddp_ext", "ddp_spawn_ext", "ddp_fork_ext") or kind == "stock":
        common = {"gradient_as_bucket_view": case.bucket_view, "static_graph": case.static_graph}
        common["find_unused_parameters"] = case.needs_find_unused
    if kind == "stock":
        return StockDDPStrategy(process_group_backend="gloo", **common)
    if case.uneven:
        common["uneven_inputs"] = case.uneven
    if case.strategy == "dp_ext":
        return DataParallelStrategy()
    if case.strategy == "horovod_ext":
        return HorovodStrategy(broadcast_buffers=case.reference == "ddp", **common)
    if case.backend == "gloo" or (case.world_size > 2 and not case.is_close_enough):
        common["process_group_backend"] = "gloo"
    if case.compression:
        common["compression"] = case.compression
    if case.strategy == "ddp_ext":
        return DDPStrategy(**common)
    if case.kill:
        common |= {"elastic": True, "commit_every_n_steps": 1, "max_restarts": 2}
    method = "fork" if case.strategy == "ddp_fork_ext" else "forkserver"
    return DDPSpawnStrategy(start_method=method, **common)


def callbacks_of(case: Case, directory: Path) -> list[pl.Callback]:
    makers: dict[str, Callable[[], pl.Callback]] = {
        "ema": lambda: EMAWeightAveraging(decay=0.9),
        "swa": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
        "early_stopping": lambda: EarlyStopping("val_loss", patience=0, min_delta=0.5),
        "accumulation": lambda: GradientAccumulationScheduler({0: 2, 1: 1}),
        "epoch": lambda: ModelCheckpoint(directory / "checkpoints", save_last=True, save_top_k=-1),
        "steps": lambda: ModelCheckpoint(directory / "checkpoints", every_n_train_steps=2, save_top_k=-1),
        "best": lambda: ModelCheckpoint(directory / "checkpoints", monitor="val_loss", save_top_k=1),
    }
    drawn = [makers[name]() for name in (case.callback, case.checkpoint) if name]
    if case.unfreeze:
        drawn.append(Unfreeze())
    if case.kill:
        drawn.append(Kill(case.kill, directory / "killed"))
    return drawn


def trainer_of(case: Case, kind: str, directory: Path, recorder: Recorder, max_epochs: int) -> pl.Trainer:
    automatic: dict[str, Any] = {}
    if case.optimization == "automatic":
        automatic["accumulate_grad_batches"] = case.accumulate
        if case.clip is not None:
            automatic |= {"gradient_clip_algorithm": case.clip[0], "gradient_clip_val": case.clip[1]}
    return pl.Trainer(
        accelerator="cpu",
        devices=1 if kind == "one" else case.world_size,
        strategy=strategy_of(case, kind),
        logger=False,
        enable_checkpointing=bool(case.checkpoint),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        max_epochs=max_epochs,
        max_steps=case.max_steps,
        limit_train_batches=case.limit_train,
        limit_val_batches=case.limit_val,
        val_check_interval=case.val_check_interval,
        check_val_every_n_epoch=case.check_val_every_n_epoch,
        precision=case.precision,
        num_sanity_val_steps=case.num_sanity_val_steps,
        reload_dataloaders_every_n_epochs=case.reload_every_n_epochs,
        sync_batchnorm=case.sync_batchnorm and kind != "one",
        callbacks=[recorder, *callbacks_of(case, directory)],
        log_every_n_steps=1,
        **automatic,
    )


class Data(pl.LightningDataModule):
    def __init__(self, case: Case, kind: str) -> None:
        super().__init__()
        self.case, self.kind = case, kind

    def train_dataloader(self) -> Any:
        return loader(self.case, self.kind, "train")

    def val_dataloader(self) -> Any:
        return loader(self.case, self.kind, "evaluate")

    test_dataloader = predict_dataloader = val_dataloader


def run(case: Case, kind: str, directory: Path) -> Results:
    """Runs all stages of a case, and returns the results of this process."""
    results = Results()
    pl.seed_everything(SEED, verbose=False)
    model, recorder, data = Model(case), Recorder(directory), Data(case, kind)
    epochs = case.max_epochs
    trainer = trainer_of(case, kind, directory, recorder, epochs)
    for number, stage in enumerate(("fit", *case.later)):
        recorder.number = number
        if stage == "fit":
            trainer.fit_loop.max_epochs = epochs
            epochs += 1
            returned = trainer.fit(model, datamodule=data)
        elif stage == "resume":
            path = directory / f"saved-{number}.ckpt"
            trainer.save_checkpoint(path)
            pl.seed_everything(SEED, verbose=False)
            model, recorder = Model(case), Recorder(directory)
            recorder.number = number
            trainer = trainer_of(case, kind, directory, recorder, epochs)
            epochs += 1
            returned = trainer.fit(model, datamodule=data, ckpt_path=path, **LOADS_EVERYTHING)
        else:
            verbose = {} if stage == "predict" else {"verbose": False}
            returned = getattr(trainer, stage)(model, datamodule=data, **verbose)
        results.returned.append(returned)
        results.states.append(state_of(trainer, model))
    return results

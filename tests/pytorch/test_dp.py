"""What ``dp_ext`` promises of training: it is that of one process on whole batches, on however many replicas.

The reference is always the Trainer with one device on the same batches. Replicas on the CPU take turns; where it could
matter, they also run at once, and with copies of the parameters as on several GPUs (the device "cpu:0" is another one
than "cpu" to torch, and what is moved to it is copied).
"""

import logging
import threading
from collections import Counter

import lightning.pytorch as pl
import pytest
import torch
import torch.utils.checkpoint
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import DataParallel, functional
from torch.utils.data import DataLoader, TensorDataset

from examples.digits import DigitsData, DigitsNet
from lightning_strategies_ext import DataParallelStrategy
from lightning_strategies_ext.registry import PYTORCH, register_all
from tests.support.models import (
    LOADS_EVERYTHING,
    MLP,
    NUM_CLASSES,
    NUM_FEATURES,
    TwoOptimizers,
    WithBatchNorm,
    loader,
    make_trainer,
    state_of,
)
from tests.support.ranks import REPOSITORY, run_warm

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")


def cpu_devices(num_replicas: int) -> list[torch.device]:
    return [torch.device("cpu")] * num_replicas


def copying_devices(num_replicas: int) -> list[torch.device]:
    return [torch.device("cpu")] + [torch.device("cpu", 0)] * (num_replicas - 1)


WAYS = {
    "in turns": lambda num: DataParallelStrategy(parallel_devices=cpu_devices(num)),
    "at once": lambda num: DataParallelStrategy(parallel_devices=cpu_devices(num), take_turns=False),
    "with copies": lambda num: DataParallelStrategy(parallel_devices=copying_devices(num), take_turns=False),
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def train(strategy, make_model=MLP, data=None, devices=1, **kwargs):
    pl.seed_everything(11, verbose=False)
    model = make_model()
    trainer = make_trainer(strategy, devices, **kwargs)
    trainer.fit(model, data or loader(64, batch_size=10), loader(21, batch_size=10))
    return trainer, model


def assert_close(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_trains_alike(strategy, make_model=MLP, devices=1, tolerance=1e-5, **kwargs):
    trainer, model = train(strategy, make_model, devices=devices, **kwargs)
    reference, expected = train("auto", make_model, **kwargs)
    assert_close(state_of(model), state_of(expected), tolerance)
    assert trainer.callback_metrics.keys() == reference.callback_metrics.keys()
    assert_close(trainer.callback_metrics, reference.callback_metrics, tolerance)
    assert (trainer.global_step, trainer.current_epoch) == (reference.global_step, reference.current_epoch)


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
@each_way
def test_training_equals_that_of_one_process_on_the_whole_batch(way, num_replicas):
    # Batches of 10 and a last one of 4: uneven for 3 and 4 replicas.
    assert_trains_alike(way(num_replicas))


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_the_name_takes_the_trainers_devices(num_replicas):
    assert_trains_alike("dp_ext", devices=num_replicas)


def test_a_batch_with_fewer_samples_than_replicas_trains_alike():
    assert_trains_alike(WAYS["in turns"](4), data=loader(13, batch_size=5))  # 5, 5 and 3 samples


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_digits_train_alike(num_replicas):
    # Its batch normalisation must see whole batches for that. In double precision: Adam divides by gradients that are
    # nearly zero, which magnifies what is rounded.
    def train_digits(strategy, devices, **kwargs):
        pl.seed_everything(1, verbose=False)
        model, data = DigitsNet(), DigitsData(64)
        trainer = make_trainer(strategy, devices, max_epochs=1, precision="64-true", **kwargs)
        trainer.fit(model, data)
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        return {**metrics, **trainer.test(model, data, verbose=False)[0]}, state_of(model)

    ours, theirs = train_digits("dp_ext", num_replicas, sync_batchnorm=True), train_digits("auto", 1)
    torch.testing.assert_close(ours[0], theirs[0])
    assert_close(ours[1], theirs[1], tolerance=1e-6)
    assert ours[0]["test_accuracy"] > 0.8


def test_the_example_trains(tmp_path):
    result = run_warm(
        REPOSITORY / "examples/digits.py", "--strategy", "dp_ext", "--dir", tmp_path, "--epochs", "4",
        env={"COLUMNS": "120"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    [row] = [line for line in result.stdout.splitlines() if "held-out images" in line]
    assert float(row.split("│")[2]) > 0.9


# --- what modules may be like ---


class Recurrent(MLP):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, NUM_CLASSES)

    def loss(self, batch):
        output, _ = self.lstm(batch[0].view(len(batch[0]), -1, 2))
        return functional.cross_entropy(self.head(output[:, -1]), batch[1])


class Tied(MLP):
    """One weight in two layers, a penalty over all parameters, a bound method as an attribute."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.second.weight = self.first.weight
        self.penalty = self.sum_of_squares

    def sum_of_squares(self):
        return sum(parameter.square().sum() for parameter in self.parameters())

    def loss(self, batch):
        features = self.second(self.first(batch[0]).relu())
        return functional.cross_entropy(self.net(features), batch[1]) + 1e-3 * self.penalty()


class Parametrized(MLP):
    """Weights that are computed in each forward pass, in torch's two ways; activations that are computed again."""

    def make_net(self):
        return nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(NUM_FEATURES, 16)),
            nn.ReLU(),
            nn.utils.spectral_norm(nn.Linear(16, NUM_CLASSES)),
        )

    def loss(self, batch):
        logits = torch.utils.checkpoint.checkpoint(self.net[:2], batch[0], use_reentrant=False)
        return functional.cross_entropy(self.net[2](logits), batch[1])


@pytest.mark.parametrize("make_model", [Recurrent, Tied, Parametrized])
@each_way
def test_modules_of_many_kinds_train_alike(way, make_model):
    assert_trains_alike(way(3), make_model)


@each_way
def test_batch_normalisation_sees_the_whole_batch_where_asked_to(way):
    ours = train(way(3), WithBatchNorm, sync_batchnorm=True)[1]
    assert_close(state_of(ours), state_of(train("auto", WithBatchNorm)[1]))
    assert type(ours.net[1]) is nn.BatchNorm1d


@each_way
def test_buffers_keep_the_first_replicas_update(way):
    _, model = train(way(2), WithBatchNorm, max_epochs=1, limit_val_batches=0)
    pl.seed_everything(11, verbose=False)
    alone = WithBatchNorm()
    optimizer = alone.configure_optimizers()
    for features, labels in loader(64, batch_size=10):
        first, second = features.tensor_split(2)
        others_buffers = {name: buffer.clone() for name, buffer in alone.net.named_buffers()}
        logits = torch.cat([alone.net(first), torch.func.functional_call(alone.net, others_buffers, second)])
        optimizer.zero_grad()
        functional.cross_entropy(logits, labels).backward()
        optimizer.step()
    assert_close(state_of(model), state_of(alone))


class RebindsABuffer(MLP):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))

    def loss(self, batch):
        self.mean = 0.5 * self.mean + 0.5 * batch[0].mean(0)
        return super().loss(batch)


@each_way
def test_a_buffer_that_is_set_anew_is_kept_too(way):
    _, model = train(way(2), RebindsABuffer, max_epochs=1, limit_val_batches=0)
    expected = torch.zeros(NUM_FEATURES)
    for features, _ in loader(64, batch_size=10):
        expected = 0.5 * expected + 0.5 * features.tensor_split(2)[0].mean(0)
    torch.testing.assert_close(model.mean, expected)


class WithDropout(MLP):
    def make_net(self):
        return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Dropout(0.5), nn.Linear(16, NUM_CLASSES))


def test_what_dropout_draws_is_the_same_in_each_run():
    states = [state_of(train("dp_ext", WithDropout, devices=3)[1]) for _ in range(2)]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


# --- optimization ---


@each_way
def test_several_optimizers_step_alike_under_manual_optimization(way):
    assert_trains_alike(way(3), TwoOptimizers)


class Gan(MLP):
    """What a GAN's training step does: two toggled optimizers, schedulers, clipping, a loss from new weights."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(NUM_CLASSES, 1)

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        with generator.toggle_model():
            loss = -self.critic(self.net(batch[0])).mean() + self.loss(batch)
            generator.zero_grad()
            self.manual_backward(loss)
            assert all(parameter.grad is None or parameter.is_leaf for parameter in self.critic.parameters())
            self.clip_gradients(generator, 0.5, "norm")
            generator.step()
        self.toggle_optimizer(critic)
        score = self.critic(self.net(batch[0]).detach()).mean()  # with the generator's new weights
        critic.zero_grad()
        self.manual_backward(score)
        critic.step()
        self.untoggle_optimizer(critic)
        by_step, on_plateau = self.lr_schedulers()
        by_step.step()
        on_plateau.step(score.detach())
        self.log_dict({"score": score, "lr": generator.param_groups[0]["lr"], "other_lr": critic.param_groups[0]["lr"]})

    def configure_optimizers(self):
        generator = torch.optim.Adam(self.net.parameters(), lr=0.01)
        critic = torch.optim.SGD(self.critic.parameters(), lr=0.01)
        by_step = torch.optim.lr_scheduler.StepLR(generator, 5, gamma=0.5)
        on_plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(critic, patience=1, factor=0.5)
        return [generator, critic], [by_step, {"scheduler": on_plateau, "monitor": "score"}]


@each_way
def test_a_gan_trains_alike(way):
    assert_trains_alike(way(3), Gan)


class WithClosure(MLP):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        self.log("loss", optimizer.step(closure=closure))

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


@each_way
def test_a_closure_runs_in_all_replicas_as_often_as_the_optimizer_asks(way):
    assert_trains_alike(way(2), WithClosure, precision="64-true")  # L-BFGS magnifies what is rounded


class WithLbfgs(MLP):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


@pytest.mark.parametrize(
    ("make_model", "kwargs"),
    [
        (MLP, {"accumulate_grad_batches": 3}),
        (MLP, {"gradient_clip_val": 0.1}),
        (MLP, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (MLP, {"precision": "64-true"}),
        (WithLbfgs, {"precision": "64-true"}),
    ],
    ids=["accumulation", "clipping by norm", "clipping by value", "double precision", "LBFGS"],
)
@each_way
def test_what_the_trainer_does_to_gradients_is_the_same(way, make_model, kwargs):
    assert_trains_alike(way(3), make_model, **kwargs)


def test_a_schedule_of_accumulation_is_followed():
    trainers = [
        train(strategy, devices=devices, max_epochs=3, callbacks=[GradientAccumulationScheduler({0: 1, 1: 4})])
        for strategy, devices in (("dp_ext", 3), ("auto", 1))
    ]
    assert trainers[0][0].global_step == trainers[1][0].global_step
    assert_close(*[state_of(model) for _, model in trainers])


class SeesDtypes(MLP):
    def __init__(self):
        super().__init__()
        self.seen = []

    def loss(self, batch):
        logits = self.net(batch[0])
        self.seen.append(logits.dtype)
        return functional.cross_entropy(logits, batch[1])


@pytest.mark.parametrize(
    ("make_precision", "dtype"),
    [
        (lambda: MixedPrecision("bf16-mixed", "cpu"), torch.bfloat16),
        (lambda: MixedPrecision("16-mixed", "cpu"), torch.float16),
    ],
    ids=["bf16-mixed", "16-mixed"],
)
@each_way
def test_mixed_precision_reaches_the_replicas(way, make_precision, dtype):
    ours = train(way(2), SeesDtypes, plugins=[make_precision()])
    theirs = train("auto", SeesDtypes, plugins=[make_precision()])
    assert set(ours[1].seen) == {dtype}
    assert_close(state_of(ours[1]), state_of(theirs[1]), tolerance=2e-2)
    scalers = [trainer.precision_plugin.scaler for trainer, _ in (ours, theirs)]
    if dtype is torch.float16:
        assert scalers[0].state_dict() == scalers[1].state_dict()


# --- what goes on around the steps ---


class CountsHooks(pl.Callback):
    """Counts the calls of a module's hooks and of its own."""

    def __init__(self):
        self.calls = Counter()
        self.outputs = []

    def on_train_batch_start(self, *args):
        self.calls["callback: on_train_batch_start"] += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.calls["callback: on_train_batch_end"] += 1
        self.outputs.append((outputs["loss"], len(batch[0])))

    def on_before_optimizer_step(self, *args):
        self.calls["callback: on_before_optimizer_step"] += 1


HOOKS = (
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start"),
    *("on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward", "optimizer_step"),
    *("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad", "on_validation_batch_start"),
    *("on_validation_batch_end", "on_train_epoch_end", "on_validation_epoch_end", "backward"),
)


def counting_model(calls):
    model = MLP()
    for name in HOOKS:
        hook = getattr(model, name)

        def counted(*args, _name=name, _hook=hook, **kwargs):
            calls[_name] += 1
            return _hook(*args, **kwargs)

        setattr(model, name, counted)
    return model


@each_way
def test_hooks_run_once_per_batch_and_see_the_whole_batch(way):
    counted = []
    for strategy in (way(3), "auto"):
        callback = CountsHooks()
        train(strategy, lambda calls=callback.calls: counting_model(calls), callbacks=[callback])
        counted.append(callback)
    ours, theirs = counted
    assert ours.calls == theirs.calls
    assert ours.calls["on_after_batch_transfer"] == 2 * (7 + 3)
    for (our_loss, our_size), (loss, size) in zip(ours.outputs, theirs.outputs, strict=True):
        torch.testing.assert_close(our_loss, loss)
        assert our_size == size


def test_checkpoints_are_those_of_a_single_device(tmp_path):
    for first, second in ((("dp_ext", 3), ("auto", 1)), (("auto", 1), ("dp_ext", 3))):
        directory = tmp_path / first[0]
        train(first[0], devices=first[1], callbacks=[ModelCheckpoint(directory, "half")], enable_checkpointing=True)
        resumed = make_trainer(*second, max_epochs=4)
        pl.seed_everything(11, verbose=False)
        model = MLP()
        resumed.fit(model, loader(64, batch_size=10), ckpt_path=directory / "half.ckpt", **LOADS_EVERYTHING)
        _, expected = train("auto", max_epochs=4)
        assert_close(state_of(model), state_of(expected))


class ValidatesWorse(MLP):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float(self.current_epoch))


def test_early_stopping_and_validation_inside_an_epoch(tmp_path):
    trainer, _ = train("dp_ext", ValidatesWorse, devices=2, max_epochs=9, callbacks=[EarlyStopping("val_loss")])
    assert trainer.current_epoch == 4  # three epochs of patience
    trainers = []
    for strategy, devices in (("dp_ext", 2), ("auto", 1)):
        checkpoint = ModelCheckpoint(tmp_path / strategy, "{step}", monitor="val_loss", save_top_k=2)
        trainer, _ = train(
            strategy, devices=devices, callbacks=[checkpoint], enable_checkpointing=True, val_check_interval=3
        )
        trainers.append([sorted(path.name for path in (tmp_path / strategy).iterdir()), checkpoint.best_model_score])
    assert trainers[0][0] == trainers[1][0]
    torch.testing.assert_close(trainers[0][1], trainers[1][1])


def test_a_logger_gets_the_same_rows(tmp_path):
    rows = []
    for strategy, devices in (("dp_ext", 3), ("auto", 1)):
        logger = CSVLogger(tmp_path, strategy)
        train(strategy, devices=devices, logger=logger, log_every_n_steps=1)
        with open(f"{logger.log_dir}/metrics.csv") as file:
            rows.append([line.strip().split(",") for line in file])
    assert len(rows[0]) == len(rows[1]) > 14
    assert rows[0][0] == rows[1][0]
    for our_row, row in zip(rows[0][1:], rows[1][1:], strict=True):
        assert [float(x or "nan") for x in our_row] == pytest.approx([float(x or "nan") for x in row], nan_ok=True)


def test_the_trainer_sees_one_process_and_user_code_a_data_parallel():
    trainer, model = train("dp_ext", devices=3)
    seen = {}

    class Looks(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            seen["model"] = trainer.model

    train("dp_ext", devices=2, callbacks=[Looks()])
    assert isinstance(seen["model"], DataParallel)
    assert (trainer.world_size, trainer.num_devices, trainer.global_rank) == (1, 3, 0)
    assert trainer.is_global_zero
    assert trainer.strategy.reduce_boolean_decision(False) is False
    assert trainer.strategy.broadcast({"a": 1}) == {"a": 1}
    assert trainer.strategy.reduce(torch.tensor([1, 2])).item() == 1.5
    assert trainer.strategy.distributed_sampler_kwargs is None
    assert trainer.lightning_module is model


def test_fit_twice_and_no_thread_is_left():
    threads = threading.active_count()
    models = []
    for strategy, devices in (("dp_ext", 3), ("auto", 1)):
        trainer, model = train(strategy, devices=devices)
        assert threading.active_count() == threads
        trainer.fit_loop.max_epochs = 4
        trainer.fit(model, loader(64, batch_size=10))
        assert threading.active_count() == threads
        models.append(model)
    assert_close(*map(state_of, models))


# --- the name that Lightning 2 has dropped ---


def test_the_old_name_works_and_says_who_serves_it(caplog):
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(caplog.handler)  # what it says goes no further where Lightning has handlers of its own
    try:
        with caplog.at_level("INFO", logger.name):
            assert_trains_alike("dp", devices=2)
    finally:
        logger.removeHandler(caplog.handler)
    said = {record.getMessage() for record in caplog.records if "lightning-strategies-ext" in record.getMessage()}
    assert len(said) == 1
    assert "strategy='dp_ext'" in said.pop()


def test_the_old_name_is_left_to_a_lightning_that_has_it():
    strategies = type(pl.strategies.StrategyRegistry)()
    strategies.register("dp", MLP, description="Lightning's own")
    register_all(strategies, PYTORCH)
    assert strategies["dp"]["strategy"] is MLP
    assert "dp_ext" in strategies


def test_the_class_registers_its_own_name_and_no_other():
    strategies = type(pl.strategies.StrategyRegistry)()
    DataParallelStrategy.register_strategies(strategies)
    assert list(strategies) == ["dp_ext"]


# --- batches ---


def test_dict_batches_with_strings_and_none_are_split():
    class FromDict(MLP):
        def loss(self, batch):
            assert batch["split"] == "train"
            assert len(batch["name"]) == len(batch["x"])
            assert batch["extra"] is None
            return super().loss((batch["x"], batch["y"]))

    def collate(samples):
        batch = torch.utils.data.default_collate(samples)
        names = [str(index) for index in range(len(samples))]
        return {"x": batch[0], "y": batch[1], "name": names, "split": "train", "extra": None}

    models = []
    for strategy, devices in (("dp_ext", 3), ("auto", 1)):
        pl.seed_everything(11, verbose=False)
        models.append(FromDict())
        data = DataLoader(loader().dataset, batch_size=10, collate_fn=collate)
        make_trainer(strategy, devices).fit(models[-1], data)
    assert_close(*map(state_of, models))


def test_tensors_that_an_iterable_dataset_yields_are_split():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(TensorDataset(*loader().dataset.tensors))

    models = []
    for strategy, devices in (("dp_ext", 2), ("auto", 1)):
        pl.seed_everything(11, verbose=False)
        models.append(MLP())
        make_trainer(strategy, devices).fit(models[-1], DataLoader(Stream(), batch_size=10))
    assert_close(*map(state_of, models))

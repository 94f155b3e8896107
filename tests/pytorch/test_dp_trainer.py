"""The environment of the steps of ``dp_ext``: hooks, checkpoints, and loggers of one process; names; batches."""

import logging
import threading
from collections import Counter

import lightning.pytorch as pl
import pytest
import torch
import torch.utils.checkpoint
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import DataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_strategies_ext import DataParallelStrategy
from lightning_strategies_ext.registry import PYTORCH, register_all
from tests.support.dp_training import assert_trains_alike, each_mode, train
from tests.support.models import LOADS_EVERYTHING, MLP, assert_close, loader, make_trainer, state_of


class CountsHooks(pl.Callback):
    """A callback that counts its calls and the calls of the module's hooks."""

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


@each_mode
def test_hooks_run_once_per_batch_and_see_the_whole_batch(make_strategy):
    counted = []
    for strategy in (make_strategy(3), "auto"):
        callback = CountsHooks()
        train(strategy, lambda calls=callback.calls: counting_model(calls), callbacks=[callback])
        counted.append(callback)
    ext, single = counted
    assert ext.calls == single.calls
    assert ext.calls["on_after_batch_transfer"] == 2 * (7 + 3)
    for (ext_loss, ext_size), (loss, size) in zip(ext.outputs, single.outputs, strict=True):
        torch.testing.assert_close(ext_loss, loss)
        assert ext_size == size


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
    assert trainer.current_epoch == 4  # three epochs without an improvement
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
    for ext_row, row in zip(rows[0][1:], rows[1][1:], strict=True):
        assert [float(x or "nan") for x in ext_row] == pytest.approx([float(x or "nan") for x in row], nan_ok=True)


def test_the_trainer_sees_one_process_and_user_code_a_data_parallel():
    trainer, model = train("dp_ext", devices=3)
    seen = {}

    class Inspects(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            seen["model"] = trainer.model

    train("dp_ext", devices=2, callbacks=[Inspects()])
    assert isinstance(seen["model"], DataParallel)
    assert (trainer.world_size, trainer.num_devices, trainer.global_rank) == (1, 3, 0)
    assert trainer.is_global_zero
    assert trainer.strategy.reduce_boolean_decision(False) is False
    assert trainer.strategy.broadcast({"a": 1}) == {"a": 1}
    assert trainer.strategy.reduce(torch.tensor([1, 2])).item() == 1.5
    assert trainer.strategy.distributed_sampler_kwargs is None
    assert trainer.lightning_module is model


def test_after_a_stage_the_model_is_no_longer_wrapped():
    trainer, model = train("dp_ext", devices=2)
    assert trainer.model is trainer.strategy.model is model
    trainer.validate(model, loader(), verbose=False)
    assert trainer.model is model


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


# --- the name that Lightning 2 removed ---


def test_the_old_name_works_and_the_log_names_its_provider(caplog):
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(caplog.handler)  # its messages do not propagate if Lightning has handlers
    try:
        with caplog.at_level("INFO", logger.name):
            assert_trains_alike("dp", devices=2)
    finally:
        logger.removeHandler(caplog.handler)
    messages = {record.getMessage() for record in caplog.records if "lightning-strategies-ext" in record.getMessage()}
    assert len(messages) == 1
    assert "strategy='dp_ext'" in messages.pop()


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

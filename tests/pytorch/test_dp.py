"""Training with ``dp_ext`` equals training in one process on whole batches, for any number of replicas."""

from functools import cache

import lightning.pytorch as pl
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional

from tests.support.dp_training import MODES, assert_trains_alike, each_mode, train
from tests.support.examples import EXAMPLE_ENVIRONMENT, example_packages
from tests.support.models import (
    MLP,
    NUM_CLASSES,
    NUM_FEATURES,
    WithBatchNorm,
    assert_close,
    loader,
    make_trainer,
    state_of,
)
from tests.support.ranks import REPOSITORY, run_script


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
@each_mode
def test_training_equals_that_of_one_process_on_the_whole_batch(make_strategy, num_replicas):
    # Batches of 10 samples and a last batch of 4: uneven for 3 and 4 replicas.
    assert_trains_alike(make_strategy(num_replicas))


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_the_name_takes_the_trainers_devices(num_replicas):
    assert_trains_alike("dp_ext", devices=num_replicas)


def test_a_batch_with_fewer_samples_than_replicas_trains_alike():
    assert_trains_alike(MODES["in turns"](4), data=loader(13, batch_size=5))  # 5, 5 and 3 samples


@cache
def train_digits(strategy, devices, **kwargs):
    # In double precision: Adam divides by gradients that are nearly zero, which amplifies rounding.
    pl.seed_everything(1, verbose=False)
    with example_packages():
        from examples.digits import DigitsData, DigitsNet

    model, data = DigitsNet(), DigitsData(64)
    trainer = make_trainer(strategy, devices, max_epochs=1, precision="64-true", **kwargs)
    trainer.fit(model, data)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {**metrics, **trainer.test(model, data, verbose=False)[0]}, state_of(model)


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_digits_train_alike(num_replicas):
    # Batch normalization must use whole batches for equal results.
    ext, single = train_digits("dp_ext", num_replicas, sync_batchnorm=True), train_digits("auto", 1)
    torch.testing.assert_close(ext[0], single[0])
    assert_close(ext[1], single[1], tolerance=1e-6)
    assert ext[0]["test_accuracy"] > 0.8


@pytest.mark.processes
def test_the_example_trains(tmp_path):
    result = run_script(
        REPOSITORY / "examples/digits.py", "--strategy", "dp_ext", "--dir", tmp_path, "--epochs", "4",
        env=EXAMPLE_ENVIRONMENT,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    [row] = [line for line in result.stdout.splitlines() if "held-out images" in line]
    assert float(row.split("│")[2]) > 0.9


# --- kinds of modules ---


class Recurrent(MLP):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, NUM_CLASSES)

    def loss(self, batch):
        output, _ = self.lstm(batch[0].view(len(batch[0]), -1, 2))
        return functional.cross_entropy(self.head(output[:, -1]), batch[1])


class Tied(MLP):
    """A model with one weight in two layers, a penalty over all parameters, and a bound method as an attribute."""

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
    """A model with computed weights, with both of torch's mechanisms, and with activation checkpointing."""

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
@each_mode
def test_modules_of_many_kinds_train_alike(make_strategy, make_model):
    assert_trains_alike(make_strategy(3), make_model)


@each_mode
def test_synchronized_batch_normalization_uses_the_whole_batch(make_strategy):
    ext = train(make_strategy(3), WithBatchNorm, sync_batchnorm=True)[1]
    assert_close(state_of(ext), state_of(train("auto", WithBatchNorm)[1]))
    assert type(ext.net[1]) is nn.BatchNorm1d


@each_mode
def test_buffers_keep_the_first_replicas_update(make_strategy):
    _, model = train(make_strategy(2), WithBatchNorm, max_epochs=1, limit_val_batches=0)
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


@each_mode
def test_a_reassigned_buffer_keeps_the_first_replicas_update(make_strategy):
    _, model = train(make_strategy(2), RebindsABuffer, max_epochs=1, limit_val_batches=0)
    expected = torch.zeros(NUM_FEATURES)
    for features, _ in loader(64, batch_size=10):
        expected = 0.5 * expected + 0.5 * features.tensor_split(2)[0].mean(0)
    torch.testing.assert_close(model.mean, expected)


class WithDropout(MLP):
    def make_net(self):
        return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Dropout(0.5), nn.Linear(16, NUM_CLASSES))


def test_dropout_draws_the_same_masks_in_each_run():
    states = [state_of(train("dp_ext", WithDropout, devices=3)[1]) for _ in range(2)]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name

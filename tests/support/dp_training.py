"""Compares training with ``dp_ext`` to training with one device on the same batches.

    @each_mode
    def test_training(make_strategy):
        assert_trains_alike(make_strategy(2), WithBatchNorm)  # two replicas

Replicas on the CPU run one after the other. Other ways run replicas concurrently, or with copies of the parameters as
on several GPUs: torch copies a tensor from the device "cpu" to the device "cpu:0".
"""

import lightning.pytorch as pl
import pytest
import torch

from lightning_strategies_ext import DataParallelStrategy
from tests.support.models import MLP, assert_close, loader, make_trainer, state_of


def cpu_devices(num_replicas: int) -> list[torch.device]:
    return [torch.device("cpu")] * num_replicas


def copying_devices(num_replicas: int) -> list[torch.device]:
    return [torch.device("cpu")] + [torch.device("cpu", 0)] * (num_replicas - 1)


MODES = {
    "in turns": lambda num: DataParallelStrategy(parallel_devices=cpu_devices(num)),
    "at once": lambda num: DataParallelStrategy(parallel_devices=cpu_devices(num), sequential=False),
    "with copies": lambda num: DataParallelStrategy(parallel_devices=copying_devices(num), sequential=False),
}
each_mode = pytest.mark.parametrize("make_strategy", MODES.values(), ids=MODES.keys())


def train(strategy, make_model=MLP, data=None, devices=1, **kwargs):
    pl.seed_everything(11, verbose=False)
    model = make_model()
    trainer = make_trainer(strategy, devices, **kwargs)
    trainer.fit(model, data or loader(64, batch_size=10), loader(21, batch_size=10))
    return trainer, model


def assert_trains_alike(strategy, make_model=MLP, devices=1, tolerance=1e-5, **kwargs):
    trainer, model = train(strategy, make_model, devices=devices, **kwargs)
    reference, expected = train("auto", make_model, **kwargs)
    assert_close(state_of(model), state_of(expected), tolerance)
    assert trainer.callback_metrics.keys() == reference.callback_metrics.keys()
    assert_close(trainer.callback_metrics, reference.callback_metrics, tolerance)
    assert (trainer.global_step, trainer.current_epoch) == (reference.global_step, reference.current_epoch)

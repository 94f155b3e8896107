"""Errors of devices and ranks that contradict the strategy, the Trainer, or the launcher."""

import os
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_strategies_ext.pytorch.ddp import DDPStrategy
from tests.support.models import MLP, WithBatchNorm, loader, make_trainer
from tests.support.ranks import free_port, run_ranks


@pytest.mark.parametrize("devices", [0, [], "0"])
def test_no_devices_are_refused(devices: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"devices=.*is not a valid input"):
        make_trainer("ddp_ext", devices=devices)


def test_root_device_raises_before_a_trainer_has_chosen_it() -> None:
    with pytest.raises(RuntimeError, match="Pass the strategy to a Trainer first"):
        _ = DDPStrategy().root_device


def set_torchruns_environment(world_size: int) -> None:
    """Sets the variables that torchrun sets for the first of ``world_size`` processes on one host."""
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "none"}
    sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in {**addresses, **sizes, **ranks}.items()})


def fit_under_torchrun(strategy: str, world_size: int, kwargs: dict[str, int]) -> str:
    set_torchruns_environment(world_size)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the caller reads the message
        make_trainer(strategy, **kwargs).fit(MLP(), loader())
    return str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize("kwargs", [{"devices": 2}, {"devices": 2, "num_nodes": 3}])
def test_a_world_size_from_torchrun_that_contradicts_the_trainer_is_refused(kwargs: dict[str, int]) -> None:
    (message,) = run_ranks(fit_under_torchrun, "ddp_ext", 4, kwargs, world_size=1)
    assert f"`devices=2` and `num_nodes={kwargs.get('num_nodes', 1)}`" in message
    assert "does not match the world size (4)" in message


@pytest.mark.processes
def test_starting_workers_in_each_process_that_torchrun_has_started_is_refused() -> None:
    (message,) = run_ranks(fit_under_torchrun, "ddp_fork_ext", 2, {"devices": 2}, world_size=1)
    assert "`start_method='fork'`" in message
    assert "TorchElasticEnvironment" in message
    assert "`strategy='ddp_ext'`" in message


def test_synchronized_batch_norm_on_cpus_is_refused_before_a_worker_starts() -> None:
    with pytest.raises(ValueError, match="`sync_batchnorm=True` requires GPUs") as caught:
        make_trainer("ddp_fork_ext", sync_batchnorm=True).fit(WithBatchNorm(), loader())
    assert "Omit the argument, or use `accelerator='gpu'`" in str(caught.value)


class WithBatchNormOfAHook(MLP):
    def configure_model(self):
        self.norm = nn.BatchNorm1d(3)


@pytest.mark.processes
def test_sync_batchnorm_on_cpu_is_refused_for_a_layer_that_a_hook_creates() -> None:
    with pytest.raises(ValueError, match=r"^`sync_batchnorm=True` requires GPUs"):
        make_trainer("ddp_fork_ext", sync_batchnorm=True).fit(WithBatchNormOfAHook(), loader())


@pytest.mark.processes
def test_without_layers_to_synchronize_the_argument_is_a_no_op() -> None:
    trainer = make_trainer("ddp_fork_ext", sync_batchnorm=True, max_epochs=1)
    trainer.fit(MLP(), loader())
    assert trainer.state.finished

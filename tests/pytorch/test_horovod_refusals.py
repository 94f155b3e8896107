"""Errors of ``horovod_ext``, and their messages."""

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_strategies_ext import HorovodStrategy, ScaleLearningRate
from lightning_strategies_ext.elastic.sampler import shard_loader
from lightning_strategies_ext.fabric.horovod import HorovodStrategy as FabricHorovodStrategy
from lightning_strategies_ext.horovod.batch_norm import SynchronizedBatchNorm
from lightning_strategies_ext.horovod_build import installed
from tests.support.horovod_ranks import run_horovod, try_horovod
from tests.support.models import MLP, WithBatchNorm, assert_close, dataset, loader, make_trainer, state_of


class Streamed(IterableDataset):
    def __iter__(self) -> Any:
        return iter(dataset())


def contradict() -> Any:
    found = []
    for kwargs in ({"devices": 3}, {"devices": 2, "num_nodes": 2}):
        with pytest.raises(ValueError, match="horovodrun has started") as caught:
            make_trainer("horovod_ext", **kwargs)
        found.append(str(caught.value))
    return found


@pytest.mark.processes
def test_devices_that_contradict_the_launcher_are_refused():
    for devices, nodes in run_horovod("horovodrun", contradict):
        assert devices.startswith("`devices=3`: horovodrun has started 2 ranks on this host. Use `devices=2`")
        assert nodes.startswith("`num_nodes=2`: horovodrun has started ranks on 1 hosts")


@pytest.mark.parametrize("make", [partial(pl.Trainer, logger=False), Fabric])
def test_several_hosts_need_a_launcher(make):
    with pytest.raises(ValueError, match="`num_nodes=2`: without a launcher"):
        make(strategy="horovod_ext", accelerator="cpu", devices=2, num_nodes=2)


@pytest.mark.parametrize("make", [partial(pl.Trainer, logger=False), Fabric])
def test_ranks_of_torchrun_are_refused(make, monkeypatch):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "run"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="started for TorchElasticEnvironment, but Horovod requires ranks from"):
        make(strategy="horovod_ext", accelerator="cpu", devices=2)


@pytest.mark.processes
@pytest.mark.parametrize("make", [partial(pl.Trainer, logger=False), Fabric])
def test_a_rank_whose_parent_has_exited_reports_it(make, monkeypatch):
    parent = subprocess.Popen(["true"])
    parent.wait()
    for name, value in {"LOCAL_RANK": "1", "LIGHTNING_STRATEGIES_EXT_HOROVOD_PARENT_PID": str(parent.pid)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=f"The process {parent.pid} that started this rank has ended"):
        make(strategy="horovod_ext", accelerator="cpu", devices=2)


@pytest.mark.parametrize("strategy_class", [HorovodStrategy, FabricHorovodStrategy])
def test_without_horovod_there_is_one_error_that_names_the_command(strategy_class, monkeypatch):
    monkeypatch.setattr(installed, "package_directory", lambda name: None if name == "horovod" else Path("torch"))
    with pytest.raises(RuntimeError, match=r"not installed.*python -m lightning_strategies_ext install-horovod"):
        strategy_class()


@pytest.mark.parametrize("strategy_class", [HorovodStrategy, FabricHorovodStrategy])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"compression": "bf16"}, ValueError, "Horovod 0.28 cannot sum bfloat16. Use 'fp16'"),
        ({"compression": "zip"}, ValueError, "`compression='zip'` is unknown. Use one of none, fp16"),
        ({"op": "median"}, ValueError, "`op='median'` is unknown"),
        ({"num_groups": -1}, ValueError, "`num_groups=-1` must be at least 0"),
        ({"sparse_as_dense": "yes"}, TypeError, "`sparse_as_dense` must be True or False"),
        ({"gradient_predivide_factor": 0}, ValueError, "must be positive"),
        ({"gradient_predivide_factor": 2, "op": "sum"}, ValueError, "splits the division of an average"),
        ({"parallel_devices": "cpu"}, TypeError, "`parallel_devices` must be a list"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(strategy_class, arguments, error, message):
    with pytest.raises(error, match=message):
        strategy_class(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {},
            RuntimeError,
            "`elastic=True`: this process was not started for a changing number of ranks. Use `horovodrun",
        ),
        ({"elastic": "yes"}, TypeError, "`elastic` must be True or False, got 'yes'"),
        ({"commit_every_n_steps": 0}, ValueError, "`commit_every_n_steps=0` must be at least 1"),
        ({"commit_every_n_steps": 2.5}, TypeError, "must be a whole number, got 2.5"),
        ({"elastic": False, "commit_every_n_steps": 5}, ValueError, "`commit_every_n_steps=5` requires `elastic=True`"),
        ({"op": "adasum"}, ValueError, "`op='adasum'` requires MPI or NCCL"),
        ({"process_set": object()}, ValueError, "a process set does not survive"),
    ],
)
def test_elastic_training_that_cannot_work_is_refused_at_construction(arguments, error, message):
    with pytest.raises(error, match=message):
        HorovodStrategy(**{"elastic": True, **arguments})


def test_a_policy_that_is_unknown_is_refused():
    with pytest.raises(ValueError, match="`by='square'` is unknown"):
        ScaleLearningRate("square")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader(dataset(), batch_size=4), "a DataLoader with the sampler SequentialSampler and the batch sampler"),
        (DataLoader(Streamed(), batch_size=4), "the IterableDataset Streamed"),
        (DataLoader(dataset(), batch_size=None, sampler=DistributedSampler(dataset(), 2, 0)), "a DataLoader with the"),
        ([1, 2], "a list"),
    ],
)
def test_elastic_training_refuses_data_that_it_cannot_shard(data, message):
    with pytest.raises(ValueError, match=rf"combined with {message}.*, because its samples.*use_distributed_sampler"):
        shard_loader(data, 0, 2, lambda given: given, lambda: 0)


def test_adasum_is_refused_under_fabric_and_batchnorm_on_cpus():
    with pytest.raises(ValueError, match="`op='adasum'` combines the steps of optimizers"):
        FabricHorovodStrategy(op="adasum")
    restored = mock.patch.dict(os.environ)  # the strategy sets the variables of a rank
    with restored, pytest.raises(ValueError, match="`sync_batchnorm=True` requires GPUs"):
        make_trainer("horovod_ext", sync_batchnorm=True).fit(WithBatchNorm(), loader())


class WrapsOptimizer(MLP):
    def configure_optimizers(self):
        import horovod.torch as hvd

        return hvd.DistributedOptimizer(super().configure_optimizers(), named_parameters=self.named_parameters())


def train_with_wrapped_optimizer() -> None:
    fabric = Fabric(strategy="horovod_ext", accelerator="cpu", devices=2)
    fabric.launch()
    model = WrapsOptimizer()
    with pytest.raises(TypeError, match="DistributedOptimizer` wraps the optimizer SGD"):
        fabric.setup(model.net, model.configure_optimizers())
    make_trainer("horovod_ext").fit(WrapsOptimizer(), loader())


@pytest.mark.processes
def test_an_optimizer_that_horovod_has_wrapped_is_refused():
    _, outcomes = try_horovod("horovodrun", train_with_wrapped_optimizer)
    assert sorted(outcomes) == [0, 1]
    for outcome in outcomes.values():
        assert outcome.name == "TypeError"
        assert "`horovod.torch.DistributedOptimizer` wraps" in outcome.text
        assert "Use the optimizer without the wrapper" in outcome.text


def test_horovods_batch_normalization_replaces_torchs_and_is_reverted():
    model = WithBatchNorm()
    before, state = model.net[1], state_of(model)
    synchronized = SynchronizedBatchNorm(model)
    assert type(model.net[1]).__module__ == "horovod.torch.sync_batch_norm"
    assert model.net[1].weight is before.weight
    model.eval()
    synchronized.restore()
    assert model.net[1] is before
    assert not before.training
    assert_close(state_of(model), state, 0)

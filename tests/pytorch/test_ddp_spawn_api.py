"""``ddp_spawn_ext`` supports the API of Lightning 1.5: the plugin, queues, ``spawn``, and communication hooks."""

import os

import pytest
import torch

from lightning_strategies_ext import DDPSpawnPlugin, DDPSpawnStrategy
from tests.support.ddp_spawn_trainers import seeded, spawn_trainer
from tests.support.models import MLP, WithBatchNorm, assert_same_bits, loader, make_trainer, state_of


@pytest.mark.processes
def test_the_plugin_takes_its_arguments_in_their_old_order(tmp_path):
    devices = [torch.device("cpu")] * 2
    plugin = DDPSpawnPlugin(devices, 3, None, None, True)
    assert plugin.parallel_devices == devices
    assert plugin.num_processes == 2
    assert plugin.num_nodes == 3
    assert plugin.sync_batchnorm
    assert isinstance(plugin, DDPSpawnStrategy)
    trainer = spawn_trainer(DDPSpawnPlugin(devices, find_unused_parameters=True), max_epochs=1)
    trainer.fit(MLP(), loader())
    assert trainer.global_step == 8
    assert not trainer.strategy.sync_batchnorm


def test_sync_batchnorm_of_the_plugin_is_that_of_the_trainer():
    trainer = spawn_trainer(DDPSpawnPlugin(sync_batchnorm=True))
    with pytest.raises(ValueError, match="requires GPUs"):
        trainer.fit(WithBatchNorm(), loader())
    assert make_trainer("ddp_spawn_ext", sync_batchnorm=True).strategy.sync_batchnorm


class CallsSetupAsDocumented(DDPSpawnPlugin):
    def setup(self, *args):
        super().setup()
        assert len(self.optimizers) == (0 if self.lightning_module is None else 1)


@pytest.mark.processes
def test_setup_of_the_plugin_can_be_called_without_a_trainer():
    plugin, model, expected = CallsSetupAsDocumented(), seeded(), seeded()
    trainer = spawn_trainer(plugin, max_epochs=1)
    plugin.setup()  # there is nothing to set up
    trainer.fit(model, loader())
    spawn_trainer(max_epochs=1).fit(expected, loader())
    assert_same_bits(state_of(model), state_of(expected))


class Queues(DDPSpawnStrategy):
    def add_to_queue(self, trainer, queue):
        super().add_to_queue(trainer, queue)
        queue.put({"pid": os.getpid(), "weights": trainer.lightning_module.net[0].weight})

    def get_from_queue(self, trainer, queue):
        super().get_from_queue(trainer, queue)
        self.received = queue.get()
        assert queue.empty()

    def post_dispatch(self, trainer):
        self.stages = [*getattr(self, "stages", ()), (os.getpid(), trainer.state.fn.value, self.received["pid"])]


@pytest.mark.processes
def test_a_strategy_can_return_additional_results():
    strategy = Queues()
    trainer = spawn_trainer(strategy, max_epochs=1)
    model = MLP()
    trainer.fit(model, loader())
    assert torch.equal(strategy.received["weights"], model.net[0].weight)
    trainer.test(model, loader(), verbose=False)
    worker = strategy.launcher.pids[0]
    assert strategy.stages == [(os.getpid(), "fit", worker), (os.getpid(), "test", worker)]


class QueuesByModule(MLP):
    def add_to_queue(self, queue):
        queue.put(torch.arange(3))

    def get_from_queue(self, queue):
        self.received = queue.get()


class QueuesByModuleWithTrainer(MLP):
    def add_to_queue(self, trainer, queue):
        queue.put(trainer.global_step)

    def get_from_queue(self, trainer, queue):
        self.received = torch.tensor([queue.get()] * 3) // 8 * trainer.global_step


@pytest.mark.processes
def test_a_module_can_return_additional_results():
    for make_model, expected in ((QueuesByModule, [0, 1, 2]), (QueuesByModuleWithTrainer, [8, 8, 8])):
        model = make_model()
        spawn_trainer(max_epochs=1).fit(model, loader())
        assert model.received.tolist() == expected


class Calls(DDPSpawnStrategy):
    def collective(self, value, *, scale):
        self.barrier("here")
        reduced = self.reduce(torch.tensor([value + self.local_rank]), reduce_op="sum")
        name = self.broadcast(f"rank {self.global_rank}", src=1)
        return {
            "reduced": reduced * scale,
            "name": name,
            "world": (self.world_size, self.num_processes, self.num_nodes),
        }


@pytest.mark.processes
def test_spawn_runs_a_function_without_a_trainer():
    strategy = Calls(parallel_devices=[torch.device("cpu")] * 2)
    result = strategy.spawn(strategy.collective, 10, scale=2)
    assert result == {"reduced": torch.tensor([42]), "name": "rank 1", "world": (2, 2, 1)}
    pids = strategy.launcher.pids
    assert strategy.spawn(strategy.collective, 10, scale=2, return_result=False) is None
    assert strategy.launcher.pids == pids
    with pytest.raises(ValueError, match="parallel_devices"):
        DDPSpawnStrategy().spawn(len, [])


@pytest.mark.processes
def test_communication_hooks_work_in_workers():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper

    model, plain = seeded(), seeded()
    strategy = DDPSpawnStrategy(ddp_comm_hook=allreduce_hook, ddp_comm_wrapper=fp16_compress_wrapper)
    spawn_trainer(strategy, max_epochs=1).fit(model, loader())
    spawn_trainer(max_epochs=1).fit(plain, loader())
    assert not torch.equal(model.net[0].weight, plain.net[0].weight)
    torch.testing.assert_close(model.net[0].weight, plain.net[0].weight, atol=1e-2, rtol=1e-2)

"""After ``fit``, no reference to the DDP module remains, which would hold a copy of all gradients."""

import gc

import pytest
import torch
from lightning.fabric import Fabric
from torch.nn.parallel import DistributedDataParallel

from lightning_strategies_ext import DDPStrategy
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import REPOSITORY, run_ranks, run_script

pytestmark = pytest.mark.processes

CASES = {
    "whole gradients": {},
    "over gloo": {"process_group_backend": "gloo"},
    "uneven, joined": {"uneven_inputs": "join"},
    "uneven, stopped": {"uneven_inputs": "stop"},
    "unused parameters": {"find_unused_parameters": True},
    "buckets by trial": {"bucket_cap_mb": "auto"},
    "bf16": {"compression": "bf16"},
    "PowerSGD": {"compression": "powersgd"},
    "top-k": {"compression": "topk"},
    "local SGD": {"compression": "localsgd"},
    "DiLoCo": {"compression": "diloco"},
}


def models_in_ddp() -> int:
    return sum(issubclass(type(each), DistributedDataParallel) for each in gc.get_objects())


def models_remaining_after_fit() -> dict[str, int]:
    gc.disable()
    num_remaining, retained = {}, []
    for name, arguments in CASES.items():
        trainer = make_trainer(DDPStrategy(**arguments), max_epochs=1, use_distributed_sampler=False)
        num_samples = 48 - 16 * trainer.global_rank * ("uneven_inputs" in arguments)
        trainer.fit(MLP(), loader(num_samples), loader())
        num_remaining[name] = models_in_ddp()
        retained.append(trainer)  # like users
    return num_remaining


def test_no_ddp_wrapper_remains_without_garbage_collection():
    assert run_ranks(models_remaining_after_fit) == [dict.fromkeys(CASES, 0)] * 2


def models_remaining_after_fabric() -> int:
    fabric = Fabric(strategy="ddp_ext_bf16", devices=2, accelerator="cpu")
    fabric.launch()
    model = MLP().net
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(wrapped(next(iter(loader()))[0]).sum())
    optimizer.step()
    assert models_in_ddp() == 1
    del wrapped, optimizer, model
    gc.collect()
    return models_in_ddp()


def test_a_model_that_fabric_has_set_up_is_collected_with_its_compression():
    assert run_ranks(models_remaining_after_fabric) == [0, 0]


RELEASE_SCRIPT = """
import gc, weakref
from tests.support.models import MLP, loader, make_trainer

def use(name, devices):
    trainer, model = make_trainer(name, devices=devices, max_epochs=1), MLP()
    trainer.fit(model, loader(), loader())
    trainer.predict(model, loader())
    return [weakref.ref(each) for each in (trainer, model, trainer.strategy)]

if __name__ == "__main__":
    for name, devices in (("dp_ext", 2), ("ddp_spawn_ext", 2), ("ddp_ext", 1)):
        references = use(name, devices)
        gc.collect()
        print(name, [each() is None for each in references])
"""


def test_a_trainer_is_collected_when_its_user_drops_it(tmp_path):
    script = tmp_path / "lets_go.py"
    script.write_text(RELEASE_SCRIPT)
    output = run_script(script, env={"PYTHONPATH": str(REPOSITORY)}).stdout
    assert [line for line in output.splitlines() if line.endswith("]")] == [
        f"{name} [True, True, True]" for name in ("dp_ext", "ddp_spawn_ext", "ddp_ext")
    ], output

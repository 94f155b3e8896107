"""``ddp_spawn_ext`` with workers on GPUs: all results return to the main process, which never uses a GPU."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_strategies_ext import DDPSpawnStrategy
from tests.gpu.devices import DEVICE_TYPE, Devices, Ranks, cuda_only, run_main, two_gpus
from tests.support.models import MLP, assert_same_bits, dataset, fit, loader, make_trainer, state_of

pytestmark = pytest.mark.processes

num_devices = pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=two_gpus)])


class Located(MLP):
    """A net that records its device."""

    def on_train_end(self) -> None:
        self.trained_on = self.device.type


def train_ranks(where: dict[str, Any]) -> dict[str, torch.Tensor]:
    return state_of(fit("ddp_ext", deterministic=True, **where)[1])


def train_workers(where: dict[str, Any], start_method: str) -> dict[str, Any]:
    strategy = DDPSpawnStrategy(start_method=start_method)
    trainer, model = fit(strategy, Located, deterministic=True, **where)
    momenta = [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()]
    pids = strategy.spawn(_pid)
    predictions = trainer.predict(model, DataLoader(dataset(), batch_size=4))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, loader())
    return {
        "state": state_of(model),
        "trained on": model.trained_on,
        "is in": {tensor.device.type for tensor in [*model.state_dict().values(), *momenta, *predictions]},
        "predictions": len(torch.cat(predictions)),
        "epochs": trainer.current_epoch,
        "has new workers": pids != strategy.spawn(_pid),
        "main process used the GPU": torch.cuda.is_initialized(),
    }


def _pid() -> int:
    import os

    return os.getpid()


@num_devices
@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_all_results_are_returned_from_a_gpu_and_the_next_stage_continues(start_method: str, num_devices: int) -> None:
    outcome = run_main(train_workers, num_devices, start_method)
    assert outcome.pop("state").keys() == Located().state_dict().keys()
    assert outcome == {
        "trained on": DEVICE_TYPE,
        "is in": {"cpu"},
        "predictions": len(dataset()),
        "epochs": 3,
        "has new workers": False,
        "main process used the GPU": False,
    }


def train_workers_once(where: dict[str, Any]) -> dict[str, torch.Tensor]:
    return state_of(fit("ddp_spawn_ext", deterministic=True, **where)[1])


@num_devices
def test_the_weights_have_the_bits_of_ddp_ext(num_devices: int) -> None:
    assert_same_bits(run_main(train_workers_once, num_devices), Ranks(num_devices).run(train_ranks)[0])


def fork_after_use(where: dict[str, Any]) -> str:
    torch.ones(1, device=DEVICE_TYPE)
    trainer = make_trainer("ddp_fork_ext", **where)
    with pytest.raises(RuntimeError, match="has already used a GPU") as raised:
        trainer.fit(MLP(), loader())
    return str(raised.value)


@cuda_only
def test_forking_a_process_that_has_used_a_gpu_is_refused_with_the_fix() -> None:
    assert "ddp_spawn_ext" in run_main(fork_after_use, Devices().devices)

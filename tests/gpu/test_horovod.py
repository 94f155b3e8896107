"""``horovod_ext`` with a Horovod that is built with NCCL, under ``horovodrun``."""

import importlib.util
from typing import Any

import pytest
import torch

from tests.gpu.devices import ACCELERATOR, DEVICE_TYPE, ON_CPU, Ranks
from tests.support.horovod_ranks import run_horovod
from tests.support.models import MLP, assert_same_bits, fit, state_of
from tests.support.shared_gpu import pass_for_own_host

pytestmark = pytest.mark.processes


def horovod_skip_reason() -> str | None:
    if importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed (python -m lightning_strategies_ext install-horovod --nccl)"
    import horovod.torch as hvd

    return None if ON_CPU or hvd.nccl_built() else "Horovod is built without NCCL (install-horovod --nccl)"


@pytest.fixture(autouse=True, scope="module")
def needs_horovod() -> None:
    if reason := horovod_skip_reason():
        pytest.skip(reason)


class Located(MLP):
    def on_train_end(self) -> None:
        self.trained_on = self.device.type


def train(accumulate: int) -> tuple[dict[str, torch.Tensor], str, int]:
    pass_for_own_host()
    options = {"accelerator": ACCELERATOR, "devices": 1, "deterministic": True}
    trainer, model = fit("horovod_ext", Located, accumulate_grad_batches=accumulate, **options)
    return state_of(model.cpu()), model.trained_on, trainer.world_size


def train_ranks(where: dict[str, Any], accumulate: int) -> dict[str, torch.Tensor]:
    return state_of(fit("ddp_ext", deterministic=True, accumulate_grad_batches=accumulate, **where)[1])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_horovod_trains_as_ddp_ext_does(ranks: Ranks, accumulate: int) -> None:
    launcher = "horovodrun" if ranks.world_size == 1 else "horovodrun on two hosts"
    found = run_horovod(launcher, train, accumulate, num_ranks=ranks.world_size)
    expected = ranks.run(train_ranks, accumulate)[0]
    for state, trained_on, world_size in found:
        assert (trained_on, world_size) == (DEVICE_TYPE, ranks.world_size)
        assert_same_bits(state, found[0][0])
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)

"""``ddp_ray_ext`` with GPUs that Ray assigns to workers: whole GPUs, and fractions of a GPU."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_strategies_ext import DDPRayStrategy
from tests.gpu.devices import DEVICE_TYPE, ON_CPU, Ranks
from tests.support.elastic_runs import STRATEGY, check_is_as_accurate_as_uninterrupted, run_plan
from tests.support.elastic_script import Net, Plan, joins_later, kill, once
from tests.support.models import MLP, assert_same_bits, dataset, fit, loader, make_trainer, state_of
from tests.support.ray_clusters import (
    FOREVER_S,
    HALF,
    PROGRAM_S,
    assert_no_process_remains,
    needs_ray,
    variables_of_own_ray,
)
from tests.support.shared_gpu import pass_for_own_host

pytestmark = [pytest.mark.processes, needs_ray, pytest.mark.timeout(FOREVER_S)]

HALF_A_GPU = HALF if ON_CPU else {**HALF, "num_gpus_per_worker": 0.5}
WHERE = {"accelerator": "cpu" if ON_CPU else "gpu"}


@pytest.fixture(scope="module", autouse=True)
def variables() -> Iterator[dict[str, str]]:
    with variables_of_own_ray() as found:
        yield found


class Located(MLP):
    """A net that records its device, and shares a GPU with other ranks."""

    def configure_callbacks(self) -> list[Any]:
        pass_for_own_host()
        return []

    def on_train_end(self) -> None:
        self.trained_on = self.device.type, os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_train_on_the_devices_that_ray_assigns_and_return_all_results(
    num_workers: int, request: pytest.FixtureRequest
):
    if num_workers > 1:
        request.getfixturevalue("two_ranks")
    share = HALF_A_GPU if num_workers > 1 else {**HALF, **({} if ON_CPU else {"num_gpus_per_worker": 1})}
    strategy = DDPRayStrategy(num_workers, **share)
    trainer = make_trainer(strategy, "auto", deterministic=True, max_epochs=2, **WHERE)
    torch.manual_seed(11)
    model = Located()
    trainer.fit(model, loader())
    assert model.trained_on == (DEVICE_TYPE, None if ON_CPU else "0")
    predictions = torch.cat(trainer.predict(model, DataLoader(dataset(), batch_size=4)))
    assert len(predictions) == len(dataset())
    with torch.no_grad():
        expected = model.net(dataset().tensors[0])
    torch.testing.assert_close(predictions, expected, rtol=1e-4, atol=1e-4)
    assert not torch.cuda.is_initialized()  # this process must not use GPUs, only its workers
    pids = strategy.launcher.pids
    strategy.close()
    assert_no_process_remains(pids)


def train_ranks(where: dict[str, Any]) -> dict[str, torch.Tensor]:
    return state_of(fit("ddp_ext", deterministic=True, **where)[1])


def test_the_weights_have_the_bits_of_ddp_ext(two_ranks: Ranks) -> None:
    strategy = DDPRayStrategy(2, **HALF_A_GPU)
    _, model = fit(strategy, Located, "auto", deterministic=True, **WHERE)
    strategy.close()
    assert_same_bits(state_of(model), two_ranks.run(train_ranks)[0])


def wait_for_the_replacement(net: Net, at: str) -> None:
    if at == "train" and net.size == 1:
        net.wait_until(lambda: net.has_happened("process 2"))


def test_a_killed_worker_is_restarted_on_its_gpu(variables: dict[str, str], two_ranks: Ranks) -> None:
    faults = once(kill, rank=1, step=70), joins_later, wait_for_the_replacement
    pauses: dict[str, Any] = {"pause_s": 0.02, "pauses_in": [1]}
    plan = Plan(2, "ray", faults, {**HALF_A_GPU, **STRATEGY}, is_on_one_gpu=not ON_CPU, **pauses)
    found = run_plan(plan, env=variables, timeout_s=PROGRAM_S)
    print(found.output)
    check_is_as_accurate_as_uninterrupted(found)
    assert [size for size, _ in found.worlds] == [2, 1, 2]
    assert found.worlds[1] == (1, 60)

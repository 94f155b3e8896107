"""``CommunicationMonitor`` and ``bucket_cap_mb="auto"`` on GPUs, where exchanges run asynchronously."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_strategies_ext import CommunicationMonitor, DDPStrategy
from lightning_strategies_ext.monitoring.analysis import PHASES
from lightning_strategies_ext.torch_distributed import bucket_search
from tests.gpu.devices import Ranks
from tests.gpu.test_host_synchronization import InMemory, waits_per_step
from tests.support.models import MLP, NUM_CLASSES, NUM_FEATURES, assert_same_bits, fit, state_of

pytestmark = pytest.mark.processes


class Large(MLP):
    """A net with 16 MiB of gradients, which fill several buckets."""

    def make_net(self) -> nn.Module:
        inner = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(nn.Linear(NUM_FEATURES, 1024), nn.ReLU(), *inner, nn.Linear(1024, NUM_CLASSES))


def monitored(where: dict[str, Any], directory: str) -> dict[str, Any]:
    options = {"deterministic": True, "max_epochs": 4, **where}
    monitor = CommunicationMonitor(every_n_steps=8, observed_steps=4, dirpath=directory, plot=False)
    without = fit("ddp_ext", Large, **options)[1]
    with_it = fit("ddp_ext", Large, callbacks=[monitor], **options)[1]
    num_bytes = sum(parameter.nbytes for parameter in with_it.parameters())
    return {
        "states": [state_of(without), state_of(with_it)],
        "num_bytes": num_bytes,
        "times": monitor.rank_times,
        "advice": monitor.advice,
    }


def test_the_monitor_changes_no_weights_and_its_times_add_up(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = ranks.run(monitored, str(tmp_path))
    for found in (first, *others):
        assert_same_bits(*found["states"])
    assert [times.rank for times in first["times"]] == list(range(ranks.world_size))
    assert first["advice"]
    print(first["times"], first["advice"])
    for times in first["times"]:
        assert times.exposed_ms + times.hidden_ms == pytest.approx(times.communication_ms)
        assert times.waiting_ms + times.transfer_ms == pytest.approx(times.exposed_ms)
        phases_ms = sum(times.phase_ms(phase) for phase in PHASES)
        assert phases_ms + times.waiting_ms + times.transfer_ms == pytest.approx(times.step_ms, rel=0.05)
        assert 0 < times.data_ms + times.forward_ms + times.backward_ms < times.step_ms
        if ranks.world_size > 1:
            assert times.num_bytes == first["num_bytes"]
            assert times.communication_ms > 0


class Monitored(InMemory):
    directory = ""

    def configure_callbacks(self) -> Any:
        options = {"every_n_steps": 1000, "observed_steps": 2, "plot": False}
        return [CommunicationMonitor(**options, dirpath=self.directory)]


def waits_of_monitored(where: dict[str, Any], directory: str) -> dict[str, float]:
    Monitored.directory = directory
    return waits_per_step(where, "ddp_ext", Monitored)


def test_unobserved_steps_make_the_host_wait_no_more_than_without_the_monitor(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(waits_of_monitored, str(tmp_path)) == [{}] * ranks.world_size
    assert (tmp_path / "trace.json").exists()


def choose(where: dict[str, Any]) -> tuple[list[str], list[dict[str, Tensor]]]:
    bucket_search.SIZES_MB = (1.0, 4.0)  # type: ignore[misc]
    turns = (len(bucket_search.SIZES_MB) + 1) * bucket_search.NUM_REPEATS
    num_steps = turns * (bucket_search.NUM_WARMUP + bucket_search.NUM_MEASURED) + 8
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(handler)
    options = {"max_epochs": -1, "max_steps": num_steps, "deterministic": True, **where}
    models = [fit(strategy, Large, **options)[1] for strategy in (DDPStrategy(bucket_cap_mb="auto"), "ddp_ext")]
    return [line for line in messages if "bucket_cap_mb" in line], [state_of(model) for model in models]


def test_a_bucket_size_is_measured_and_chosen_without_a_change_of_weights(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(choose)
    log_text = "".join(first[0])
    assert re.match(r"`bucket_cap_mb='auto'`: set to (bucket_cap_mb=[14]|DDP's default sizes)", log_text), log_text
    for _, states in (first, second):
        assert_same_bits(*states)

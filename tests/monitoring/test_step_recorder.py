"""The steps that a rank observes, and the transfer of its records to rank 0; these tests start no process."""

import time
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_strategies_ext.monitoring.mailbox import Mailbox
from lightning_strategies_ext.monitoring.records import BATCH, EXCHANGE, MODEL_EXCHANGE, Window
from lightning_strategies_ext.monitoring.step_recorder import StepRecorder


class Clock:
    """A timer that records exchanges while it is enabled."""

    def __init__(self) -> None:
        self.is_on = False
        self.num_read = 0

    def set_recording(self, is_on: bool) -> None:
        self.is_on = is_on

    def last_exchange(self) -> tuple[int, int, int]:
        assert self.is_on
        self.num_read += 1
        now = time.time_ns()
        return now - 3, now - 2, now - 1


class Training:
    """The steps of a training from a start step, with a step recorder."""

    def __init__(
        self, every_n_steps: int = 10, observed_steps: int = 3, num_done: int = 100, on_windows: Any = None
    ) -> None:
        self.num_done = num_done
        self.is_observed = False
        self.observed: list[int] = []
        self.windows: list[Window] = []
        self.failed: list[Exception] = []
        self.clock = Clock()
        self.recorder = StepRecorder(
            *(0, "a", every_n_steps, observed_steps, num_done, self.switch, self.clock),
            *(lambda num_steps: 100 * num_steps, None, on_windows or self.on_windows, self.failed.append),
        )

    def switch(self, is_on: bool) -> None:
        self.is_observed = is_on

    def on_windows(self, windows: list[Window]) -> None:
        self.windows += windows

    def step(self, num_batches: int = 1) -> None:
        for batch in range(num_batches):
            self.recorder.on_fetch_start(self.num_done)
            if self.is_observed:
                self.recorder.on_batch_start()
                self.recorder.on_backward_start()
                self.recorder.on_backward_end()
                if batch == num_batches - 1:
                    self.recorder.on_optimizer_step()
                self.recorder.on_batch_end()
        if self.is_observed:
            self.observed.append(self.num_done - 100)
        self.num_done += 1


def test_the_first_steps_and_different_steps_of_each_window_are_observed() -> None:
    training = Training()
    for _ in range(34):
        training.step(num_batches=2)
    training.recorder.finish(training.num_done, 1)
    assert training.observed == [0, 1, 2, 3, 4, 11, 12, 13, 22, 23, 24, 33]
    assert [window.num_steps for window in training.windows] == [10, 10, 10, 4]
    assert [window.num_bytes for window in training.windows] == [1000, 1000, 1000, 400]
    assert [window.number for window in training.windows] == [0, 1, 2, 3]
    assert training.windows[1].batches["step"].tolist() == [11, 11, 12, 12, 13, 13]
    assert training.windows[1].exchanges["step"].tolist() == [11, 12, 13]
    assert training.clock.num_read == len(training.observed)
    assert not training.clock.is_on
    assert not training.is_observed
    first, *others = training.windows[1].batches["previous_end"].tolist()
    assert first == 0 < min(others)
    assert training.failed == []


def test_exchanges_are_recorded_for_the_steps_whose_batches_are_recorded() -> None:
    training = Training(every_n_steps=4)
    for _ in range(8):
        training.step()
        training.recorder.on_exchange(1, 2, 3, 50)
        training.recorder.on_exchange(1, 2, 3, 7, is_model_exchange=True)
    training.recorder.finish(training.num_done, 1)
    assert [len(each.batches) for each in training.windows] == [4, 3]
    for each in training.windows:
        steps, is_model_exchange = each.exchanges["step"], each.exchanges["kind"] == MODEL_EXCHANGE
        assert set(steps[~is_model_exchange]) == set(each.batches["step"])
        assert len(set(steps[is_model_exchange])) == 4


@pytest.mark.parametrize(("every_n_steps", "observed_steps"), [(1, 1), (2, 5), (3, 3)])
def test_all_steps_of_a_window_that_is_not_longer_are_observed(every_n_steps: int, observed_steps: int) -> None:
    training = Training(every_n_steps, observed_steps)
    for _ in range(6):
        training.step()
    training.recorder.finish(training.num_done, 1)
    assert training.observed == list(range(6))
    assert sum(window.num_steps for window in training.windows) == 6


def test_a_step_continues_after_an_error_in_the_recorder() -> None:
    def on_windows(windows: list[Window]) -> None:
        raise OSError("the disk is full")

    training = Training(on_windows=on_windows)
    for _ in range(11):
        training.step()
    assert [str(error) for error in training.failed] == ["the disk is full"]


# --- transfer to rank 0 ---


def window(rank: int, number: int) -> Window:
    return Window(rank, "a", number, 5, 500, np.zeros(3, BATCH), np.zeros(2, EXCHANGE))


def test_windows_of_all_ranks_are_collected_without_waiting_for_an_exited_rank() -> None:
    store = dist.HashStore()
    boxes = [Mailbox(store, rank, 3) for rank in range(3)]
    for rank, box in enumerate(boxes):
        box.post(window(rank, 0))
    for rank in (0, 1):
        boxes[rank].post(window(rank, 1))
    for rank in (1, 2):
        boxes[rank].finish(5)
    began = time.monotonic()
    boxes[0].finish(0.5)
    assert time.monotonic() - began < 5
    complete = list(boxes[0].complete())
    assert [[(each.number, each.rank) for each in windows] for windows in complete] == [[(0, 0), (0, 1), (0, 2)]]
    assert all(each.num_bytes == 500 for windows in complete for each in windows)
    assert list(boxes[0].complete()) == []


def test_an_unavailable_store_closes_only_the_mailbox() -> None:
    class UnavailableStore(dist.HashStore):
        def set(self, key: str, value: Any) -> None:
            raise RuntimeError("Connection reset by peer")

    box = Mailbox(UnavailableStore(), 0, 2)
    box.post(window(0, 0))
    box.finish(5)
    assert list(box.complete()) == []

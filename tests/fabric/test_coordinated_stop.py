"""``fabric.strategy.coordinated_stop``: a signal on any rank stops the loops of all ranks before the same step."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from tests.support.horovod_ranks import run_horovod
from tests.support.models import MLP, loader
from tests.support.ranks import run_ranks

MAX_STEPS = 10_000


def step(fabric: Fabric, model: Any, optimizer: Any, batch: Any) -> None:
    loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.001 * fabric.global_rank)  # ranks differ by as many steps as collectives permit


def train(fabric: Fabric, pid: int | None = None, signum: int = signal.SIGTERM) -> tuple[int, list[int]]:
    """Sends the signal from rank 1 to a process; returns the number of steps, and the sum of all ranks' losses."""
    module = MLP()
    model, optimizer = fabric.setup(module.net, torch.optim.SGD(module.net.parameters(), lr=0.1))
    (batch, *_) = fabric.setup_dataloaders(loader())
    done = 0
    with fabric.strategy.coordinated_stop(signum) as should_stop:
        while done < MAX_STEPS and not should_stop():
            step(fabric, model, optimizer, batch)
            done += 1
            if done == 5 and fabric.global_rank == 1:
                os.kill(pid or os.getpid(), signum)
    assert signal.getsignal(signum) == signal.SIG_DFL
    return done, fabric.all_gather(torch.tensor(done)).tolist()  # all ranks are still connected, and at the same step


def train_in_a_script(strategy: str, signum: int) -> tuple[int, list[int]]:
    fabric = Fabric(strategy=strategy, devices=2, accelerator="cpu")
    fabric.launch()
    return train(fabric, signum=signum)


@pytest.mark.processes
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1], ids=lambda signum: signum.name)
def test_a_signal_on_one_rank_stops_all_before_the_same_step(signum: int):
    check(run_ranks(train_in_a_script, "ddp_ext", signum))


@pytest.mark.processes
def test_a_sigterm_on_a_rank_of_horovod_stops_all_before_the_same_step():
    check(run_horovod("horovodrun", train_in_a_script, "horovod_ext", signal.SIGTERM))


def check(outcomes: list[tuple[int, list[int]]]) -> None:
    (first, gathered), (second, _) = outcomes
    assert 5 <= first == second < MAX_STEPS
    assert gathered == [first, second]


@pytest.mark.processes
def test_a_sigterm_to_the_main_process_stops_its_workers():
    done, gathered = Fabric(strategy="ddp_spawn_ext", devices=2, accelerator="cpu").launch(train, os.getpid())
    assert 5 <= done < MAX_STEPS
    assert gathered == [done, done]


def receive_late_signal() -> list[str]:
    fabric = Fabric(strategy="ddp_ext", devices=2, accelerator="cpu")
    fabric.launch()
    seen: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append("as before"))
    with fabric.strategy.coordinated_stop() as should_stop:
        assert not should_stop()
        if fabric.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == []
    fabric.barrier()
    return seen if fabric.global_rank == 0 else ["as before"]


@pytest.mark.processes
def test_a_sigterm_after_the_last_step_is_not_lost():
    assert run_ranks(receive_late_signal) == [["as before"]] * 2


def test_one_process_stops_at_once():
    fabric = Fabric(strategy="ddp_ext", devices=1, accelerator="cpu")
    with fabric.strategy.coordinated_stop(signal.SIGUSR1) as should_stop:
        assert not should_stop()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert should_stop()


def test_coordinated_stop_before_launch_is_refused():
    fabric = Fabric(strategy="ddp_ext", devices=2, accelerator="cpu")
    with pytest.raises(RuntimeError, match=r"fabric\.launch"), fabric.strategy.coordinated_stop():
        pass

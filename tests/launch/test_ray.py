"""What ``ddp_ray_ext`` needs of a cluster, and what it says where there is no Ray. No Ray is started here."""

import os

import pytest

from lightning_strategies_ext import DDPRayStrategy
from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.launch.protocol import Arrived, Members, Notice, Place, Ready
from lightning_strategies_ext.launch.ray import cluster, words
from lightning_strategies_ext.launch.ray.demand import Demand
from lightning_strategies_ext.peers import Peer
from tests.support.models import MLP, loader, make_trainer
from tests.support.ranks import run_script
from tests.support.ray_clusters import needs_ray


@pytest.mark.parametrize(
    ("demand", "num_workers", "hosts"),
    [
        (Demand(), 2, [{"CPU": 2.0}]),
        (Demand(0.5), 4, [{"CPU": 2.0}]),
        (Demand(0.1), 10, [{"CPU": 1.0}]),
        (Demand(3, placement="SPREAD"), 2, [{"CPU": 4.0}, {"CPU": 4.0}]),
        (Demand(1, 0.5, {"fast": 1}), 2, [{"CPU": 4.0, "GPU": 1.0, "fast": 2.0, "memory": 1e9}]),
    ],
)
def test_what_fits_is_let_through(demand, num_workers, hosts):
    demand.check_fits(num_workers, hosts, "the cluster")


@pytest.mark.parametrize(
    ("demand", "num_workers", "hosts", "message"),
    [
        (Demand(), 3, [{"CPU": 2.0}], "`num_workers=3` .*`num_cpus_per_worker=1` each need 3 CPUs, and it has 2[.]"),
        (Demand(1, 1), 2, [{"CPU": 8.0}], "`num_gpus_per_worker=1` each need 2 GPUs, and it has 0[.]"),
        (Demand(1, 0, {"fast": 2}), 1, [{"CPU": 8.0, "fast": 1.0}], "'fast': 2.* need 2 of 'fast', and it has 1[.]"),
        (Demand(3), 2, [{"CPU": 4.0}, {"CPU": 2.0}], r"each need 3 CPUs do not fit .* 2 hosts have room for 1 \+ 0 of"),
    ],
)
def test_what_does_not_is_refused_with_the_numbers(demand, num_workers, hosts, message):
    with pytest.raises(ValueError, match=message):
        demand.check_fits(num_workers, hosts, "it")


def test_what_is_said_in_the_middle_of_a_job_arrives_as_it_was_and_nothing_else_is_heard():
    members = [Member(Peer(rank, "host", 7, 0.5, "name", ("10.0.0.1",)), fit=1, batches=4) for rank in range(2)]
    said = [
        Ready(),
        Ready("lost"),
        Arrived(members[0]),
        Place(1, 2, 3, "10.0.0.1", 80),
        Members(members),
        Members(None),
    ]
    assert [words.decoded(words.encoded(word)) for word in said] == said
    assert isinstance(words.decoded(words.encoded(Notice())), Notice)
    with pytest.raises(ValueError, match="said by nobody"):
        words.decoded(b'["Order", {}]')


WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from lightning.pytorch import Trainer
try:
    Trainer(strategy="ddp_ray_ext", accelerator="cpu", devices=2)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.processes
def test_without_ray_the_extra_is_named_when_the_strategy_is_made():
    result = run_script("-c", WITHOUT_RAY)
    assert result.returncode == 0, result.stdout
    assert "UnavailableHereError `strategy='ddp_ray_ext'` needs Ray" in result.stdout
    assert "pip install 'lightning-strategies-ext[ray]'" in result.stdout


@pytest.mark.parametrize(
    ("address", "mode", "is_said"),
    [("ray://head:10001", "", True), ("ray://head:10001", "token", False), ("head:6379", "", False)],
)
def test_where_nobody_answers_ray_client_the_token_is_thought_of(monkeypatch, address: str, mode: str, is_said: bool):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    message = cluster.unreachable(address, ConnectionError("ray client connection timeout"))
    assert message.startswith(f"`address={address!r}`: no Ray cluster is there (ray client connection timeout). ")
    assert ("`RAY_AUTH_MODE=token` before Ray is imported" in message) is is_said


@needs_ray
def test_what_this_machine_does_not_have_is_refused_before_ray_is_started():
    import ray

    num_cpus = len(os.sched_getaffinity(0))
    trainer = make_trainer(DDPRayStrategy(1000, address="local"), devices=1)
    with pytest.raises(ValueError, match=rf"need 1000 CPUs, and this machine has {num_cpus}[.]"):
        trainer.fit(MLP(), loader())
    assert not ray.is_initialized()

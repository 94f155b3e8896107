"""A rank closes its connections to other ranks, running or not, and does not close other connections."""

import os
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_strategies_ext._system.gpu_sync import is_aborted
from lightning_strategies_ext._system.peers import Peer, exchange_peers
from lightning_strategies_ext.torch_distributed import process_group
from lightning_strategies_ext.torch_distributed.disconnect import can_abort, disconnect
from tests.support.ranks import outcomes_of_ranks, run_ranks

pytestmark = pytest.mark.processes

#: Timeout of the group, in seconds.
TIMEOUT_S = 60
#: Time limit that only a rank that waits for the timeout, or for a child, exceeds.
LIMIT_S = TIMEOUT_S / 2


def join(backend: str = "gloo") -> tuple[int, Peer]:
    rank = int(os.environ["LOCAL_RANK"])
    environment = LightningEnvironment()
    environment.set_global_rank(rank)
    environment.set_world_size(2)
    process_group.start(environment, backend, torch.device("cpu"), timedelta(seconds=TIMEOUT_S))
    return rank, exchange_peers(process_group.default_store(), rank, 2)[1 - rank]


def fails_once_it_is_cut_off(other: Peer) -> float:
    threading.Timer(0.5, disconnect, [[other]]).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3))
    return time.monotonic() - start


def wait_for_one_that_is_killed() -> float:
    rank, other = join()
    if rank == 1:
        if os.fork() == 0:  # like a DataLoader worker, which inherits all open files
            while other.is_running():
                time.sleep(0.05)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    while other.is_running():
        time.sleep(0.01)
    return fails_once_it_is_cut_off(other)


def test_connections_to_a_killed_rank_are_closed_although_its_child_holds_them():
    survivor, _ = outcomes_of_ranks(wait_for_one_that_is_killed)
    assert survivor.value is not None, survivor
    assert 0.4 < survivor.value < LIMIT_S


def disconnect_and_receive() -> list[bytes]:
    rank, other = join()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    dist.barrier()
    if rank == 0:
        assert fails_once_it_is_cut_off(other) < LIMIT_S
    client.sendall(b"still here")
    store = process_group.default_store()
    store.set(f"done {rank}", "too")
    seen = [accepted.recv(10), store.get(f"done {1 - rank}")]
    store.set(f"seen {rank}", "")
    store.get("seen 1")  # rank 0's process serves the store
    return seen


def test_connections_of_other_libraries_and_of_the_store_remain_open():
    assert run_ranks(disconnect_and_receive) == [[b"still here", b"too"]] * 2


def wait_over_gloo_with_another_backend() -> float:
    rank, other = join("cpu:gloo,cuda:gloo")
    store, waited_s = process_group.default_store(), 0.0
    if rank == 0:
        waited_s = fails_once_it_is_cut_off(other)
        store.set("done", "")
    store.get("done")
    store.set(f"seen {rank}", "")
    store.get("seen 1")  # rank 0's process serves the store
    return waited_s


def test_disconnecting_aborts_gloo_also_if_gpus_have_another_backend():
    waited_s, _ = run_ranks(wait_over_gloo_with_another_backend)
    assert 0.4 < waited_s < LIMIT_S


# --- NCCL, simulated by groups and backends that record their abort ---


def abort_groups_that_wait_for_each_other() -> list[Any]:
    aborted, have_begun = [], threading.Barrier(3)

    class Waiting(dist.ProcessGroup):
        """A simulated NCCL group, whose abort waits for the GPU, which another group's collective may occupy."""

        def abort(self) -> None:
            have_begun.wait(LIMIT_S)
            aborted.append(self)

        def getBackendName(self) -> str:
            return "waiting"

    dist.Backend.register_backend("waiting", lambda store, rank, size, timeout: Waiting(rank, size), devices=["cpu"])
    dist.init_process_group("waiting", store=dist.HashStore(), rank=0, world_size=1)
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    is_abortable = can_abort()
    disconnect([])
    found = [is_abortable, is_aborted(), [aborted.count(group) for group in groups]]
    process_group.leave_subgroup(groups[2])  # the other subgroup is destroyed with the default group
    process_group.stop()
    return [*found, dist.is_initialized(), len(aborted)]


def test_all_groups_are_aborted_at_once_as_one_may_delay_the_abort_of_another():
    assert run_ranks(abort_groups_that_wait_for_each_other, world_size=1) == [[True, True, [1, 1, 1], False, 3]]


def abort_one_that_has_gloo_too() -> list[Any]:
    aborted = []

    class OfDevice:
        def __init__(self, name: str) -> None:
            self.name = name

        def abort(self) -> None:
            if self.name == "cpu":
                raise RuntimeError("Backend gloo does not support abort")  # as in some versions of torch
            aborted.append(self.name)

    backends = {name: OfDevice(name) for name in ("cpu", "cuda")}

    class OfTwo(dist.ProcessGroup):
        _device_types = (torch.device("cpu"), torch.device("cuda"))

        def _get_backend(self, device: torch.device) -> OfDevice:
            return backends[device.type]

        def abort(self) -> None:  # like torch's method in C++
            for backend in backends.values():
                backend.abort()

        def getBackendName(self) -> str:
            return "of two"

    dist.Backend.register_backend("of_two", lambda store, rank, size, timeout: OfTwo(rank, size), devices=["cpu"])
    dist.init_process_group("of_two", store=dist.HashStore(), rank=0, world_size=1)
    disconnect([])
    found = [*aborted, is_aborted()]
    process_group.stop()
    return [*found, dist.is_initialized()]


def test_a_backend_without_abort_does_not_prevent_the_abort_of_the_gpu_backend():
    assert run_ranks(abort_one_that_has_gloo_too, world_size=1) == [["cuda", True, False]]

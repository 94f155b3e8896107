"""The store of ranks of one host: torch's requirements of a store, and the exits of its processes."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_strategies_ext import host_store, host_store_server, rank_variables
from lightning_strategies_ext._system.frames import encode_frame
from lightning_strategies_ext.host_store import HostStore
from lightning_strategies_ext.torch_distributed import process_group
from tests.support.ranks import REPOSITORY, run_command, run_ranks, start_script


@pytest.fixture
def store() -> HostStore:
    return host_store.serve(host_store.new_name())


# --- a store ---


def use(store: dist.Store) -> list[Any]:
    """Calls all methods of a store that torch uses, and returns the results."""
    store.set("key", "value")
    found = [store.get("key"), store.add("sum", 2), store.add("sum", 3), store.get("sum")]
    found += [store.check(["key"]), store.check(["key", "other"]), store.num_keys()]
    found += [store.compare_set("new", "", "first"), store.compare_set("new", "x", "y")]
    found += [store.compare_set("new", "first", "second"), store.compare_set("missing", "x", "y")]
    store.append("list", "a")
    store.append("list", "b")
    store.multi_set(["m1", "m2"], ["1", "2"])
    store.wait(["m1", "m2"])
    store.wait(["m1"], timedelta(seconds=5))
    found += [store.get("list"), store.multi_get(["m1", "m2"]), store.has_extended_api()]
    store.set("m1", "0" * 300_000)  # more than the buffer of a socket
    return [*found, len(store.get("m1")), store.delete_key("m1"), store.delete_key("m1"), store.check(["m1"])]


def test_the_store_matches_the_store_of_torch_directly_and_through_a_prefix(store: HostStore):
    expected = use(dist.HashStore())
    assert use(store) == expected
    for key in store.list_keys():
        store.delete_key(key)
    assert use(dist.PrefixStore("part", store)) == expected


def test_waiting_ends_with_an_error_that_names_the_keys(store: HostStore):
    with pytest.raises(dist.DistStoreError, match=re.escape("0.2 s waiting for the keys ['a', 'part/b']")):
        store.wait(["a", "part/b"], timedelta(seconds=0.2))
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError, match="part/c"):
        dist.PrefixStore("part", store).get("c")
    store.set_timeout(timedelta(seconds=30))
    store.set("part/c", "here")
    assert dist.PrefixStore("part", store).get("c") == b"here", "an abandoned request must not affect later requests"


def test_a_thread_that_waits_delays_no_other(store: HostStore):
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(store.get("late")))
    thread.start()
    assert store.add("n", 1) == 1
    assert thread.is_alive()
    store.set("late", "value")
    thread.join(30)
    assert found == [b"value"]


@pytest.mark.processes
def test_a_rank_detects_at_once_that_the_process_of_the_store_has_exited():
    program = (
        "import sys; from lightning_strategies_ext import host_store; host_store.serve(sys.argv[1]).get('stop');"
        " print('stopped')"
    )
    name = host_store.new_name()
    server = subprocess.Popen([sys.executable, "-c", program, name], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    client = host_store.connect(name)  # before a process serves the store
    client.set("key", "value")
    with suppress(dist.DistNetworkError):  # the process may exit before it has replied
        client.set("stop", "")
    assert server.communicate(timeout=60)[0] == "stopped\n"
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError, match="The process that serves the store of these ranks has ended"):
            client.get("another key")
    assert time.monotonic() - began < 30


def test_an_invalid_request_is_an_error_of_the_client_that_sends_it(store: HostStore):
    store.set("text", "no number")
    with pytest.raises(dist.DistStoreError, match="`add` failed in the store of these ranks: invalid literal"):
        store.add("text", 1)
    with pytest.raises(dist.DistStoreError, match="`multi_set` failed"):
        store.multi_set(["a", "b"], ["1"])
    assert store.get("text") == b"no number"


def connection_to(store: HostStore, *requests: Any) -> socket.socket:
    """Connects a client that sends requests and does not read the responses."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(host_store_server.address(store.name))
    for request in requests:
        connection.sendall(host_store_server.encode(request))
    return connection


def test_a_client_that_does_not_read_its_reply_delays_no_other_client(store: HostStore):
    size = 1 << 22
    store.set("large", "0" * size)
    with connection_to(store, ("multi_get", (["large"],))) as slow:
        began = time.monotonic()
        assert store.add("n", 1) == 1
        assert time.monotonic() - began < 3, "less than all limits of the server"
        slow.settimeout(60)
        is_done, (value,) = host_store._receive(slow)
        assert (is_done, len(value)) == (True, size)


@pytest.mark.parametrize("received", [encode_frame(b"wrong"), b"\0\xff\xff\xff\xff"], ids=["pickle", "length"])
def test_bytes_that_are_no_request_close_only_their_connection(store: HostStore, received: bytes):
    with connection_to(store) as other:
        other.sendall(received)
        other.settimeout(60)
        assert other.recv(1) == b""
    assert store.add("n", 1) == 1


def test_a_value_that_is_too_long_is_an_error_of_the_requesting_client_only(store: HostStore):
    with pytest.raises(dist.DistStoreError, match=r"`set`: .* longer than the maximum of 67,108,864 bytes"):
        store.set("key", b"0" * (1 << 26))
    for key in ("first", "second"):
        store.set(key, b"0" * 40_000_000)
    with connection_to(store, ("multi_get", (["first", "second", "last"],))) as waiting:
        assert store.add("last", 1) == 1
        waiting.settimeout(60)
        is_done, text = host_store._receive(waiting)
        assert not is_done
        assert "longer than the maximum" in text
    assert len(store.get("first")) == 40_000_000


SERVE = """
import os, sys, time
from lightning_strategies_ext import host_store
store = host_store.serve(sys.argv[1])
if sys.argv[2:] == ["fork"] and os.fork() == 0:
    time.sleep(100)
    os._exit(0)
print("serves", flush=True)
time.sleep(100)
"""


@contextmanager
def serving_process(*args: str) -> "Iterator[tuple[HostStore, subprocess.Popen[str]]]":
    name = host_store.new_name()
    process = start_script("-c", SERVE, name, *args)
    try:
        assert process.stdout is not None
        assert any("serves" in line for line in process.stdout)
        yield host_store.connect(name), process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.processes
def test_the_exit_of_a_waiting_client_does_not_stop_the_store():
    with serving_process() as (store, process):
        waiting = connection_to(store, ("wait", (["key"],)))
        setting = connection_to(store)
        store.set("before", "")
        process.send_signal(signal.SIGSTOP)  # so that the following requests arrive together
        setting.sendall(host_store_server.encode(("set", ("key", b"value"))))
        waiting.close()
        process.send_signal(signal.SIGCONT)
        assert store.get("key") == b"value"
        setting.close()


@pytest.mark.processes
def test_the_exit_of_the_store_process_is_detected_while_its_child_runs():
    with serving_process("fork") as (store, process):
        store.set("key", "value")
        process.kill()
        with pytest.raises(dist.DistNetworkError, match="has ended"):
            store.get("another key")


# --- groups ---


def join_by_files(path: str) -> tuple[Any, ...]:
    """Joins a group whose backend may use the store in threads, and which therefore uses a store in a file."""
    environment = LightningEnvironment()
    environment.set_global_rank(environment.local_rank())
    environment.set_world_size(2)
    before = set(os.listdir("/dev/shm"))
    found = []
    for _ in range(2):
        process_group.start(environment, "cpu:gloo", torch.device("cpu"), timedelta(seconds=60))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        group = dist.new_group([0, 1])
        dist.all_reduce(tensor, group=group)
        below = dist.distributed_c10d._get_default_store()
        while isinstance(below, dist.PrefixStore):
            below = below.underlying_store
        store = process_group.default_store()
        store.set(f"from {environment.global_rank()}", "")
        store.wait(["from 0", "from 1"])
        found.append((tensor.item(), type(below).__name__))
        dist.destroy_process_group()
    named = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("lightning_strategies_ext-")}
    return found, named


@pytest.mark.processes
def test_a_backend_with_threads_of_its_own_gets_a_store_in_a_file_without_a_name(tmp_path: Path):
    assert run_ranks(join_by_files, str(tmp_path)) == [([(4.0, "FileStore")] * 2, set())] * 2


def join_and_start_a_launcher() -> str:
    """Starts another launcher's ranks from a rank that this package has started; returns the names of their stores."""
    os.environ[rank_variables.STORE] = rank_variables.store_variable("name", os.environ["MASTER_PORT"])
    rank_variables.record_owner()
    program = "from lightning_strategies_ext import rank_variables as r; r.record_owner(); print(r.store_name())"
    variables = {**os.environ, "RANK": "0"}
    output = run_command(sys.executable, "-c", program, env=variables).stdout
    del os.environ[rank_variables.OWNER]  # before the first stage, a rank has not recorded itself
    output += run_command(sys.executable, "-c", program, env={**os.environ, "MASTER_PORT": "1"}).stdout
    return output + str(rank_variables.store_name())


@pytest.mark.processes
def test_ranks_that_another_launcher_has_started_from_a_rank_do_not_use_its_store():
    assert run_ranks(join_and_start_a_launcher, world_size=1) == ["None\nNone\nname"]

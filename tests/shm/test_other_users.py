"""``shm``, and the caches of its library and of Horovod, on a machine with other users."""

import ctypes
import json
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_strategies_ext._system import user_cache
from lightning_strategies_ext._system.user_cache import UnsafePathError
from lightning_strategies_ext.horovod_build import command
from lightning_strategies_ext.horovod_build.build_key import BuildKey
from lightning_strategies_ext.horovod_build.cache import WheelCache
from lightning_strategies_ext.shm import compiler, native_build, rendezvous
from lightning_strategies_ext.shm.links import LocalPeer, PeerLostError
from lightning_strategies_ext.shm.native_build import NATIVE_VARIABLE, library
from lightning_strategies_ext.shm.rendezvous import Rendezvous
from tests.shm.start import start_shm
from tests.support import ranks
from tests.support.ranks import outcomes_of_ranks, run_script

OTHER_USER = 65_500
_PR_SET_DUMPABLE = 4  # of prctl
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, or give files away")


# --- no home, no cache ---


def reduce_as_a_user_without_home(home: str | None) -> tuple[float, bool]:
    os.environ.pop("HOME", None)
    if home is not None:
        os.environ["HOME"] = home
    os.setgroups([])
    os.setgid(OTHER_USER)
    os.setuid(OTHER_USER)
    start_shm()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor.sum().item(), dist.group.WORLD._native is not None


@pytest.mark.processes
@needs_root
@pytest.mark.parametrize("home", [None, "/root", "/proc"])
def test_a_user_without_a_home_trains_and_the_cost_is_logged(home: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(ranks.rank_environment, NATIVE_VARIABLE, raising=False)
    outcomes = outcomes_of_ranks(reduce_as_a_user_without_home, home)
    assert [outcome.value for outcome in outcomes] == [(6.0, True)] * 2, str(outcomes[0])
    messages = [[line for line in outcome.output.splitlines() if "cannot be stored" in line] for outcome in outcomes]
    assert [len(lines) for lines in messages] == [1, 0], str(outcomes[0])


def test_without_a_directory_to_compile_in_all_operations_use_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    not_a_directory = tmp_path / "file"
    not_a_directory.write_text("")
    monkeypatch.setenv(user_cache.CACHE_VARIABLE, str(not_a_directory))
    monkeypatch.setattr(native_build.tempfile, "TemporaryDirectory", no_directory)
    library.cache_clear()
    with pytest.raises(compiler.NativeLibraryError, match="no directory"):
        library()
    library.cache_clear()


def no_directory() -> None:
    raise FileNotFoundError("No usable temporary directory found")


# --- cached files ---


@pytest.fixture
def cached_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provides the path of the cached library."""
    monkeypatch.setenv(user_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(NATIVE_VARIABLE, raising=False)
    library.cache_clear()
    library()
    library.cache_clear()
    (library_path,) = (tmp_path / "cache" / "shm").iterdir()
    return library_path


def make_untrusted(path: Path, permissions: str) -> None:
    """Changes the owner or mode of a path, so that another user could have changed it."""
    if permissions == "of another user":
        os.chown(path, OTHER_USER, -1)
    else:
        path.chmod(path.stat().st_mode | (stat.S_IWGRP if permissions == "writable by its group" else stat.S_IWOTH))


PERMISSIONS = [pytest.param("of another user", marks=needs_root), "writable by its group", "writable by others"]


@pytest.mark.processes
@pytest.mark.parametrize("target", ["file", "directory", "directory above"])
@pytest.mark.parametrize("permissions", PERMISSIONS)
def test_a_library_that_others_may_have_written_is_not_loaded(cached_library: Path, target: str, permissions: str):
    path = {
        "file": cached_library,
        "directory": cached_library.parent,
        "directory above": cached_library.parent.parent,
    }[target]
    cached_library.unlink()  # this process has the file mapped
    cached_library.write_text("not a library: loading it could crash the process")
    make_untrusted(path, permissions)
    functions, uncached_reason = library()
    assert functions.all_reduce_group_bytes() > 0
    assert str(path) in uncached_reason
    assert "another user" in uncached_reason or "other users" in uncached_reason
    assert cached_library.read_text().startswith("not a library")


@pytest.mark.processes
def test_a_symbolic_link_in_the_cache_is_not_followed(cached_library: Path, tmp_path: Path):
    other_file = tmp_path / "other_file"
    other_file.write_text("other_file")
    cached_library.unlink()
    cached_library.symlink_to(other_file)
    load = "from lightning_strategies_ext.shm.native_build import library; print(repr(library().uncached_reason))"
    assert run_script("-c", load).stdout == "''\n"
    assert other_file.read_text() == "other_file"
    assert not cached_library.is_symlink()


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o000])
def test_created_files_are_not_writable_by_other_users_for_any_umask(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        directory = tmp_path / "a" / "b" / "c"
        user_cache.create(directory)
        (tmp_path / "made").write_text("made")
        user_cache.store_file(tmp_path / "made", directory / "cached_library")
    finally:
        os.umask(before)
    assert user_cache.safe_path(directory / "cached_library") == directory / "cached_library"
    assert [file.name for file in directory.iterdir()] == ["cached_library"]


@pytest.mark.parametrize("permissions", PERMISSIONS)
def test_a_wheel_that_others_may_have_written_is_not_installed(tmp_path: Path, permissions: str):
    cache, key = WheelCache(tmp_path / "wheels"), BuildKey.for_this_environment(command.torch_version())
    cache.entry(key).mkdir(parents=True)
    wheel = cache.entry(key) / "horovod-0.28.1-py3-none-any.whl"
    wheel.write_text("")
    assert cache.find(key) == wheel
    make_untrusted(wheel, permissions)
    with pytest.raises(UnsafePathError, match=re.escape(str(wheel))):
        cache.find(key)
    wheel.unlink()
    make_untrusted(cache.directory, permissions)
    with pytest.raises(UnsafePathError, match=re.escape(str(cache.directory))), cache.lock(key, waiting=pytest.fail):
        pytest.fail("it was locked")


@pytest.mark.processes
def test_the_command_reports_that_a_wheel_is_not_safe(tmp_path: Path):
    make = f"""
from pathlib import Path
from lightning_strategies_ext.horovod_build.cache import WheelCache
from lightning_strategies_ext.horovod_build import command
from lightning_strategies_ext.horovod_build.requirements import find_toolchain
toolchain, _ = find_toolchain(False, False)
key = command.BuildKey.for_this_environment(command.torch_version() or "", toolchain.mpi, toolchain.cuda)
entry = WheelCache(Path({str(tmp_path)!r}, "wheels")).entry(key)
entry.mkdir(parents=True)
(entry / "horovod.whl").write_text("")
(entry / "horovod.whl").chmod(0o666)
command._is_installed = lambda key: False
from lightning_strategies_ext.__main__ import main
import sys
sys.argv = ["x", "install-horovod", "--wheel-dir", {str(tmp_path / "wheels")!r}]
print("exit code", main())
"""
    output = run_script("-c", make).stdout
    assert "exit code 1" in output, output
    assert "is writable by other users" in output
    assert "--wheel-dir" in output
    assert "Traceback" not in output


# --- the rendezvous ---


def connect_with_unauthenticated_connections(num_unauthenticated: int, as_others: bool) -> tuple[float, float]:
    rank = int(os.environ["LOCAL_RANK"])
    with ExitStack() as connections:
        listen = Rendezvous.announce

        def announce(self: Rendezvous, *args: Any) -> Any:
            announcement = listen(self, *args)
            if rank == 1:
                connect_first(announcement[0]["address"], num_unauthenticated, as_others, connections)
                self._store.set("all are connected", "")
            self._store.wait(["all are connected"])
            return announcement

        Rendezvous.announce = announce  # type: ignore[method-assign]
        start = time.monotonic()
        start_shm()
        seconds = time.monotonic() - start
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item(), seconds


def connect_first(address: str, number: int, as_others: bool, connections: ExitStack) -> None:
    if as_others:
        os.seteuid(OTHER_USER)
    for _ in range(number):
        link = connections.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        link.setblocking(False)
        try:
            link.connect("\0" + address)
        except BlockingIOError:  # the queue is full, as intended
            break
    if as_others:
        os.seteuid(0)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("num_unauthenticated", "as_others"), [(3, False), pytest.param(300, True, marks=needs_root), (300, False)]
)
def test_silent_connections_of_other_processes_do_not_delay_ranks(num_unauthenticated: int, as_others: bool):
    outcomes = outcomes_of_ranks(connect_with_unauthenticated_connections, num_unauthenticated, as_others)
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        assert outcome.value[0] == 2.0
        assert outcome.value[1] < 4, "the rank has waited for each unauthenticated connection"


def rendezvous_of_one(tmp_path: Path, size: int = 2) -> Rendezvous:
    return Rendezvous(0, size, dist.FileStore(str(tmp_path / "store"), size))


def test_an_unresponsive_rank_is_named(tmp_path: Path):
    rendezvous = rendezvous_of_one(tmp_path, size=3)
    with pytest.raises(TimeoutError, match="rank 1 of the group, rank 2 of the group did not connect"):
        rendezvous.announce({}, time.monotonic() + 0.3)
    rendezvous.close()


@pytest.mark.parametrize(("rank", "kind"), [(1, PeerLostError), (0, TimeoutError)])
def test_a_rank_that_does_not_connect_is_named(tmp_path: Path, rank: int, kind: type[Exception]):
    """The lower rank waits for a connection; the other rank connects to a port on which no process listens."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    one, other = Rendezvous(rank, 2, store), Rendezvous(1 - rank, 2, store)
    addresses = [each._address for each in (one, other)]
    other.close()
    peer, announcement = LocalPeer(1 - rank, 1 - rank, 4711), {"address": addresses[1], "token": "00" * 16}
    start = time.monotonic()
    with pytest.raises(kind, match=rf"rank {1 - rank} \(pid 4711\)"):
        one.connect([(peer, announcement)], 0, time.monotonic() + 0.5)
    assert time.monotonic() - start < 5
    one.close()


@pytest.mark.parametrize("hello", [b"", b"short", b"\1\0\0\0" + b"x" * 16, b"\7\0\0\0" + b"x" * 16])
def test_a_process_without_the_token_is_not_accepted_as_a_rank(tmp_path: Path, hello: bytes):
    rendezvous = rendezvous_of_one(tmp_path)
    peer = LocalPeer(1, 1, 4711)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect("\0" + rendezvous._address)
        socket.send_fds(other, [hello], [0]) if hello else other.shutdown(socket.SHUT_WR)
        with pytest.raises(TimeoutError, match="rank 1"):
            rendezvous.connect([(peer, {})], 0, time.monotonic() + 0.3)
        assert other.recv(16) == b"", "the connection was accepted"
    rendezvous.close()


@contextmanager
def effective_user(user: int) -> Iterator[None]:
    """Sets the effective user, which the kernel records for listening and connecting sockets."""
    before = os.geteuid()
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(before)
        # The kernel has made this process undumpable, so later tests could not open its memory in /proc.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


@needs_root
@pytest.mark.parametrize("user", [OTHER_USER, 65534])
def test_a_rank_sends_nothing_to_a_process_of_another_user(tmp_path: Path, user: int):
    rendezvous = Rendezvous(1, 2, dist.FileStore(str(tmp_path / "store"), 2))
    with effective_user(user), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind("\0taken-by-another-user")
        other.listen()
        os.seteuid(0)
        announcement = {"address": "taken-by-another-user", "token": "00" * 16}
        with pytest.raises(PeerLostError, match=rf"rank 0 \(pid 4711\).*a process of user {user} uses"):
            rendezvous.connect([(LocalPeer(0, 0, 4711), announcement)], 0, time.monotonic() + 60)
        connection, _ = other.accept()
        assert connection.recv(64) == b""
    rendezvous.close()


@needs_root
def test_a_rank_rejects_a_process_of_another_user(tmp_path: Path):
    rendezvous = rendezvous_of_one(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        with effective_user(OTHER_USER):
            other.connect("\0" + rendezvous._address)
        socket.send_fds(other, [struct.pack("<I16s", 1, rendezvous._token)], [0])
        with pytest.raises(TimeoutError, match=f"rank 1 .pid {os.getpid()}"):
            rendezvous.connect([(LocalPeer(1, 1, os.getpid()), {})], 0, time.monotonic() + 0.3)
        with pytest.raises(ConnectionResetError):  # closed without a read
            other.recv(16)
    rendezvous.close()


def start_as_two_users() -> None:
    if os.environ["LOCAL_RANK"] == "1":
        os.setgid(OTHER_USER)
        os.setuid(OTHER_USER)
        wait = dist.PrefixStore.wait

        def wait_and_sleep(*args: Any) -> None:  # the server of the store, rank 0, reads everything before this rank
            wait(*args)
            time.sleep(1)

        dist.PrefixStore.wait = wait_and_sleep  # type: ignore[method-assign,assignment]
    start_shm()


@pytest.mark.processes
@needs_root
def test_ranks_of_different_users_get_one_error_that_names_both():
    for outcome in outcomes_of_ranks(start_as_two_users):
        assert outcome.error is not None
        assert "PermissionError: `shm`: rank" in outcome.error
        assert f"as user {OTHER_USER}" in outcome.error
        assert "as user 0" in outcome.error
        assert "process_group_backend='gloo'" in outcome.error


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_gets_the_error_about_users_of_one_host(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = dist.FileStore(str(tmp_path / "store"), 3)
    users, hosts = [1000, 1000, 1001], ["a", "b", "b"]
    for other in {0, 1, 2} - {rank}:
        store.set(f"rank/{other}", json.dumps({"host": hosts[other], "user": users[other]}))
        store.set(f"read/{other}", "")
    monkeypatch.setattr(rendezvous, "host_identity", lambda: hosts[rank])
    monkeypatch.setattr(os, "geteuid", lambda: users[rank])
    with closing(Rendezvous(rank, 3, store)) as own, pytest.raises(PermissionError, match=r"rank 1 .* rank 2 as user"):
        own.announce({}, time.monotonic() + 20)


def test_the_host_is_the_kernel_and_its_network():
    assert rendezvous.host_identity() == rendezvous.host_identity()
    assert "net:[" in rendezvous.host_identity()

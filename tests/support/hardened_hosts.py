"""Runs a command under the conditions of a hardened host, on x86-64.

    python -m tests.support.hardened_hosts no_proc no_pidfd -- python train.py

Functions import their modules, because the process that sets the conditions does not need torch, whose import takes a
second. Each condition applies to the command and all processes that it starts, and to no other process of this host.
"""

import ctypes
import os
import platform
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 22, 24, 38
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH, _CAP_SYS_PTRACE, _CAP_SYS_ADMIN = 1, 2, 19, 21
_EPERM, _MEMFD_CREATE, _PIDFD_OPEN = 1, 319, 434
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_SECCOMP_MODE_FILTER, _SECCOMP_RET_ERRNO, _SECCOMP_RET_ALLOW = 2, 0x50000, 0x7FFF0000

#: Code that makes a process inaccessible to other processes of its user.
NOT_DUMPABLE = "import ctypes; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"


def _mounts() -> list[str]:
    """Returns the mounts of this host, without network namespaces, which other tests create at the same time."""
    return [line for line in Path("/proc/mounts").read_text().splitlines() if "/run/netns" not in line]


def _prefix(conditions: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.hardened_hosts", *conditions.split(), "--"]


@cache
def _skip_reason(conditions: str) -> str | None:
    """Returns why this host does not permit the conditions, or None."""
    from tests.support.ranks import run_command

    probe = run_command(*_prefix(conditions), "true")
    return None if probe.returncode == 0 else (probe.stdout.splitlines() or ["no reason"])[-1]


def run_hardened(
    *command: object, conditions: str, timeout_s: float = 150, **env: str
) -> "subprocess.CompletedProcess[str]":
    """Runs a command under conditions, separated by spaces. Skips the test if this host does not permit them."""
    import pytest

    from tests.support.ranks import run_command

    if platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("the numbers of system calls are those of Linux on x86-64")
    prefix = _prefix(conditions)
    mounts = _mounts()
    if (reason := _skip_reason(conditions)) is not None:
        pytest.skip(f"this host does not support {conditions}: {reason}")
    with tempfile.TemporaryDirectory() as directory:
        ran = run_command(*prefix, *map(str, command), env=env, timeout_s=timeout_s, cwd=Path(directory))
    assert _mounts() == mounts, "the conditions hold for the command alone"
    return ran


def _call(function: str, *args: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def _no_proc() -> None:
    _call("umount2", b"/proc", 2)


def _proc(options: str) -> None:
    _no_proc()  # a remount would change the options of the host's /proc
    _mount("proc", "/proc", "proc", 0, options)


def _full_shared_memory() -> None:
    _mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=64k")
    with open("/dev/shm/full", "wb") as file:
        file.write(bytes(1 << 16))


def _read_only(directory: str) -> None:
    _mount(directory, directory, "none", _MS_BIND)
    _mount("none", directory, "none", _MS_REMOUNT | _MS_BIND | _MS_RDONLY)


def _no_capabilities() -> None:
    """Removes the capabilities of root that other users do not have, from the execution of the command on."""
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH, _CAP_SYS_PTRACE, _CAP_SYS_ADMIN):
        _call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)


def _forbid(system_call: int) -> None:
    """Makes a system call fail, as in a container whose seccomp profile does not list the call."""
    instructions = [
        (_LOAD, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 1, system_call),
        (_RETURN, 0, 0, _SECCOMP_RET_ERRNO | _EPERM),
        (_RETURN, 0, 0, _SECCOMP_RET_ALLOW),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(program)))
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0)


_CONDITIONS: dict[str, Callable[[], None]] = {
    "no_proc": _no_proc,
    "proc_of_processes_only": partial(_proc, "subset=pid,hidepid=invisible"),
    "hidden_processes": partial(_proc, "hidepid=invisible"),
    "full_shared_memory": _full_shared_memory,
    "read_only_shared_memory": partial(_read_only, "/dev/shm"),
    "read_only_home": partial(_read_only, str(Path.home())),
    "no_capabilities": _no_capabilities,
    "no_pidfd": partial(_forbid, _PIDFD_OPEN),
    "no_memfd": partial(_forbid, _MEMFD_CREATE),
}


def main() -> None:
    """Establishes the conditions of the command line, and executes its command."""
    at = sys.argv.index("--")
    _call("unshare", _CLONE_NEWNS)
    _mount("none", "/", "none", _MS_REC | _MS_PRIVATE)
    for condition in sys.argv[1:at]:
        _CONDITIONS[condition]()
    os.execvp(sys.argv[at + 1], sys.argv[at + 1 :])


if __name__ == "__main__":
    main()

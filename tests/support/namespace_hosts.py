"""Two hosts on one Linux machine, as network namespaces; see :mod:`benchmarks.network_namespaces`.

with two_hosts(tmp_path) as hosts:  # raises NoHostsError if this machine permits no namespaces
    process = hosts[1].start("train.py", log=tmp_path / "log", MASTER_ADDR=ADDRESSES[0])
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import network_namespaces
from benchmarks.network_namespaces import NoHostsError as NoHostsError
from benchmarks.network_namespaces import run as run
from tests.support.ranks import REPOSITORY, clean_environment

ADDRESSES = network_namespaces.address_of(0), network_namespaces.address_of(1)

# As with the real `ssh`, the command has only the environment of a login, runs in the user's home directory, is not a
# child of a process here, and continues when `ssh` is killed.
_SSH = """\
#!{python} -I
import os, pwd, select, subprocess, sys

words = [word for word in sys.argv[1:] if word != "-x"]
options = [index for index, word in enumerate(words[:-1]) if word in ("-o", "-p", "-i")]
host, *command = [word for index, word in enumerate(words) if not {{index, index - 1}} & {{*options}}]
user = pwd.getpwuid(os.getuid())
environment = {{"HOME": user.pw_dir, "USER": user.pw_name, "SHELL": "/bin/sh", "PATH": os.defpath}}
ended, end = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        enter_command = {enter_commands!r}[host]
        shell = [*enter_command, "/bin/sh", "-c", " ".join(command)]
        code = subprocess.run(shell, env=environment, cwd=user.pw_dir, stdin=subprocess.DEVNULL).returncode
        os.write(end, bytes([code if code >= 0 else 128 - code]))
    os._exit(0)
os.close(end)
while {detects_loss} and not select.select([ended], [], [], 1)[0]:
    cable = subprocess.run(["ip", "-n", host, "link", "show", "eth0"], capture_output=True, text=True).stdout
    if "state UP" not in cable:
        sys.exit(255)
code = os.read(ended, 1)
sys.exit(code[0] if code else 255)
"""


class Host(network_namespaces.Host):
    """A host on which tests start programs."""

    def start(self, *command: str | Path, log: Path, **env: str) -> subprocess.Popen[bytes]:
        """Starts a program on the host; its output goes to the file ``log``."""
        with log.open("wb") as output:
            return subprocess.Popen(
                [*self.enter(), sys.executable, *map(str, command)],
                # With several threads, the order in which floats are summed, and thus their last bits, would differ.
                env={**clean_environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a signal to the program's process group does not reach pytest
            )


@contextmanager
def two_hosts(directory: Path) -> Iterator[list[Host]]:
    """Creates two hosts that reach each other, until the block ends.

    Args:
        directory: Directory for the file of their names.

    Raises:
        NoHostsError: If this machine does not permit network namespaces.
    """
    with network_namespaces.hosts(2, directory, Host) as hosts:
        yield hosts


def unplug(*_: object) -> None:
    """Takes down the network of the host that this process runs on."""
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


def put_ssh(hosts: Sequence[Host], directory: Path, *, detects_loss: bool = False) -> None:
    """Writes a replacement for ``ssh``, which reaches these hosts by their names, to a directory of the search path.

    Args:
        hosts: Hosts that it reaches.
        directory: Directory of the program.
        detects_loss: Whether it exits when the host loses its network, as with ``ServerAliveInterval``.
    """
    program = directory / "ssh"
    enter_commands = {host.name: host.enter() for host in hosts}
    program.write_text(_SSH.format(python=sys.executable, enter_commands=enter_commands, detects_loss=detects_loss))
    program.chmod(0o700)

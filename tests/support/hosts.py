"""Two hosts on one Linux machine, see :mod:`benchmarks.namespaces`, with programs forked as in :mod:`.warm`."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import namespaces
from benchmarks.namespaces import NoHostsError as NoHostsError
from benchmarks.namespaces import run as run
from tests.support import warm
from tests.support.ranks import REPOSITORY, clean_environment

# One thread each: with more, sums of floats come in another order and the last bits differ.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ADDRESSES = namespaces.address_of(0), namespaces.address_of(1)


class Host(namespaces.Host):
    """A host that programs are started on."""

    def start(self, *command: str | Path, log: Path, **env: str) -> subprocess.Popen[bytes]:
        """Starts a program on the host; its output goes to the file ``log``."""
        with log.open("wb") as output:
            return subprocess.Popen(
                [*self.enter(), warm.python(), *map(str, command)],
                env={**clean_environment(), **ONE_THREAD, "PYTHONPATH": str(REPOSITORY), **env},
                stdout=output,
                stderr=subprocess.STDOUT,
            )


@contextmanager
def two_hosts(directory: Path) -> Iterator[list[Host]]:
    """Two hosts that reach each other, until the block ends.

    Args:
        directory: For the file of their names.

    Raises:
        NoHostsError: If they cannot be had.
    """
    with namespaces.hosts(2, directory, Host) as hosts:
        yield hosts

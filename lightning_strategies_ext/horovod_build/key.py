"""For what a wheel is good: a wheel of another key is never taken."""

import json
import platform
import re
import sys
import sysconfig
from dataclasses import asdict, dataclass

from lightning_strategies_ext.horovod_build.fixes import REVISION
from lightning_strategies_ext.horovod_build.source import HOROVOD_VERSION


@dataclass(frozen=True)
class BuildKey:
    """What a build of Horovod depends on.

    Example::

        key = BuildKey.here(torch="2.13.0+cpu", mpi="openmpi-5.0.11")

    Attributes:
        torch: Its version with the local part: a wheel for ``+cpu`` does not load beside a ``+cu130``.
        mpi: The MPI by kind and version, or empty: MPICH's and Open MPI's libraries do not replace each other.
        nccl: The CUDA version of an NCCL build, or empty.
        python: The interpreter's tag.
        platform: System, machine and C library: a cache on a network home is seen by different hosts.
        horovod: The release that was built.
        fixes: The revision of our changes to it.
    """

    torch: str
    mpi: str
    nccl: str
    python: str
    platform: str
    horovod: str
    fixes: int

    @classmethod
    def here(cls, torch: str, mpi: str = "", nccl: str = "") -> "BuildKey":
        """The key of this interpreter on this host."""
        libc = "".join(platform.libc_ver())
        return cls(
            torch=torch,
            mpi=mpi,
            nccl=nccl,
            python=f"cp{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}",
            platform=f"{sysconfig.get_platform()}-{libc}" if libc else sysconfig.get_platform(),
            horovod=HOROVOD_VERSION,
            fixes=REVISION,
        )

    @property
    def directory_name(self) -> str:
        """The key as the name of a directory, readable, since users look there to free space."""
        parts = [f"horovod-{self.horovod}.{self.fixes}", f"torch-{self.torch}", self.python, self.platform]
        parts += [f"mpi-{self.mpi}"] * bool(self.mpi) + [f"nccl-cuda-{self.nccl}"] * bool(self.nccl)
        return re.sub(r"[^A-Za-z0-9.+_-]", "-", "_".join(parts))

    def as_json(self) -> str:
        """The key as it stands in the wheel's marker."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def matches(self, marker: dict[str, object] | None) -> bool:
        """Whether a wheel or an installed Horovod with this marker is the one of this key."""
        return marker == asdict(self)

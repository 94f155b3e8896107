"""Key of a wheel: a wheel is used only if its key matches."""

import json
import platform
import re
import sys
import sysconfig
from dataclasses import asdict, dataclass

from lightning_strategies_ext.horovod_build.patches import REVISION
from lightning_strategies_ext.horovod_build.source import HOROVOD_VERSION


@dataclass(frozen=True)
class BuildKey:
    """Properties on which a build of Horovod depends.

    Example::

        key = BuildKey.for_this_environment(torch="2.13.0+cpu", mpi="openmpi-5.0.11")

    Attributes:
        torch: Version of torch with the local part: a wheel for ``+cpu`` cannot be loaded with ``+cu130``.
        mpi: Kind and version of MPI, or empty. Libraries of MPICH and Open MPI are not interchangeable.
        nccl: CUDA version of a build with NCCL, or empty.
        python: Tag of the interpreter.
        platform: System, machine, and C library, because different hosts may share a cache in a network home directory.
        horovod: Version of Horovod.
        fixes: Revision of the patches; the name is part of the marker of built wheels.
    """

    torch: str
    mpi: str
    nccl: str
    python: str
    platform: str
    horovod: str
    fixes: int

    @classmethod
    def for_this_environment(cls, torch: str, mpi: str = "", nccl: str = "") -> "BuildKey":
        """Creates a key with the interpreter and platform of this process."""
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
        """Name of the key's directory; readable, because users look there to free disk space."""
        parts = [f"horovod-{self.horovod}.{self.fixes}", f"torch-{self.torch}", self.python, self.platform]
        parts += [f"mpi-{self.mpi}"] * bool(self.mpi) + [f"nccl-cuda-{self.nccl}"] * bool(self.nccl)
        return re.sub(r"[^A-Za-z0-9.+_-]", "-", "_".join(parts))

    def as_json(self) -> str:
        """Returns the content of the wheel's marker."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def matches(self, marker: dict[str, object] | None) -> bool:
        """Returns whether the marker of a wheel or an installed Horovod matches this key."""
        return marker == asdict(self)

"""What Lightning asks for ranks and addresses in a process that has its seat from Ray."""

from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from lightning_strategies_ext.launch.protocol import WorkerRankInfo


class RayEnvironment(ClusterEnvironment):
    """A cluster environment: where ranks and addresses come from in a process that Ray has started as one of several.

    Args:
        rank_info: Of the process.
    """

    def __init__(self, rank_info: WorkerRankInfo) -> None:
        super().__init__()
        self._rank_info = rank_info

    @property
    @override
    def creates_processes_externally(self) -> bool:
        """True: Ray has."""
        return True

    @property
    @override
    def main_address(self) -> str:
        """Of the first worker's host."""
        return self._rank_info.main_address

    @property
    @override
    def main_port(self) -> int:
        """One that was free there."""
        return self._rank_info.main_port

    @staticmethod
    @override
    def detect() -> bool:
        """False: the strategy knows."""
        return False

    @override
    def world_size(self) -> int:
        """Number of workers."""
        return self._rank_info.world_size

    @override
    def set_world_size(self, size: int) -> None:
        """Does nothing: it is known."""

    @override
    def global_rank(self) -> int:
        """Among all workers."""
        return self._rank_info.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """Does nothing: it is known."""

    @override
    def local_rank(self) -> int:
        """Among those of this host."""
        return self._rank_info.local_rank

    @override
    def node_rank(self) -> int:
        """Of this host."""
        return self._rank_info.node_rank

"""Lightning's cluster environment of a process whose rank comes from Ray."""

from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from lightning_strategies_ext.launch.protocol import WorkerRankInfo


class RayEnvironment(ClusterEnvironment):
    """Cluster environment with the ranks and addresses of a process that Ray has started as one of several."""

    def __init__(self, rank_info: WorkerRankInfo) -> None:
        super().__init__()
        self._rank_info = rank_info

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return self._rank_info.main_address

    @property
    @override
    def main_port(self) -> int:
        return self._rank_info.main_port

    @staticmethod
    @override
    def detect() -> bool:
        return False  # the strategy creates this environment itself

    @override
    def world_size(self) -> int:
        return self._rank_info.world_size

    @override
    def set_world_size(self, size: int) -> None:
        """No-op: Ray has set the world size."""

    @override
    def global_rank(self) -> int:
        return self._rank_info.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """No-op: Ray has set the rank."""

    @override
    def local_rank(self) -> int:
        return self._rank_info.local_rank

    @override
    def node_rank(self) -> int:
        return self._rank_info.node_rank

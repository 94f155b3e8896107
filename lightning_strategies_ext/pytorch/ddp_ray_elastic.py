"""DDPRayElasticStrategy: elastic DDP in workers on a Ray cluster. Name ``ddp_ray_elastic_ext``.

It combines its two base classes. Unlike in elastic training on one host, ranks may be on several hosts. Local ranks and
the backend therefore depend on the world, and the main process notifies the ranks of a host loss.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from lightning_strategies_ext._lightning import launching
from lightning_strategies_ext._system.peers import host_identity
from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.launch.protocol import WorkerRankInfo
from lightning_strategies_ext.launch.ray.cluster import is_client_address
from lightning_strategies_ext.launch.strategy_protocols import WorkerContext
from lightning_strategies_ext.pytorch.ddp_ray import DDPRayStrategy
from lightning_strategies_ext.pytorch.ddp_spawn_elastic import DDPSpawnElasticStrategy
from lightning_strategies_ext.pytorch.rank_assignment import use_rank_info
from lightning_strategies_ext.torch_distributed.disconnect import disconnect

if TYPE_CHECKING:
    from lightning_strategies_ext.launch.ray.actor import MainLink  # not importable on Windows


class DDPRayElasticStrategy(DDPSpawnElasticStrategy, DDPRayStrategy):
    """Data parallelism in workers on a Ray cluster, with a ``fit`` that continues after the loss of a worker or host.

    The other workers restore the newest commit and continue with fewer ranks. Meanwhile Ray starts a new worker, on the
    same host or another, which joins them before a step. Other stages run as in :class:`.DDPRayStrategy`. The workers
    end after ``fit``.

    Args:
        *args: Arguments of :class:`.DDPRayStrategy`.
        **kwargs: Arguments of :class:`.DDPRayStrategy`, and the arguments that :class:`.DDPSpawnElasticStrategy` adds:
            ``min_workers`` (fewer workers wait at most ``timeout`` for new ones), ``commit_every_n_steps``,
            ``max_restarts``, ``restart_window``, and ``scale_learning_rate``.

    Raises:
        StrategyUnavailableError: If Ray is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If a value or a combination of values is invalid.

    Example::

        from lightning_strategies_ext import DDPRayStrategy

        trainer = Trainer(strategy=DDPRayStrategy(num_workers=8, address="auto", elastic=True, min_workers=6))
    """

    strategy_name = "ddp_ray_elastic_ext"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if is_client_address(self._address):
            raise ValueError(
                f"`address={self._address!r}` cannot be combined with `elastic=True`: workers connect to the main"
                " process, which they cannot reach through Ray Client. Run the script in the cluster, or omit"
                " `elastic`."
            )
        self.restart_policy = replace(self.restart_policy, wait_timeout_s=self._placement_timeout_s)

    # --- in a worker ---

    @override
    def enter_worker(self, context: WorkerContext) -> None:
        """Extends :meth:`.DDPRayStrategy.enter_worker`: subscribes to notifications of lost peers."""
        super().enter_worker(context)
        if context.channel is not None:
            cast("MainLink", context.channel).on_peer_loss = self._abort_world

    @override
    def _become_joining_rank(self) -> None:
        launching.set_rank_zero_only_rank(self.global_rank)  # the rank of its WorkerRankInfo

    @override
    def _set_rank(self, rank: int, world_size: int) -> None:
        assert self._worker is not None
        assert self._worker.rank_info is not None
        members = self.membership.members
        use_rank_info(self, _rank_info_among(members, rank, self._worker.rank_info), self.root_device)
        launching.set_rank_zero_only_rank(rank)

    @override
    def _disconnect(self) -> None:
        disconnect(self._other_peers, match_hosts=False)  # Ray has connections to other hosts, too

    def _abort_world(self, world: int) -> None:
        """Disconnects this rank from a world with a lost peer, for which it may be waiting. Runs in its own thread."""
        membership = self._membership
        if membership is not None and membership.is_member_of(world):
            self._disconnect()


def _rank_info_among(members: Sequence[Member], rank: int, before: WorkerRankInfo) -> WorkerRankInfo:
    """Returns the rank info of a rank of this host in a world; local ranks are numbered in the order of ranks."""
    hosts = list(dict.fromkeys(member.peer.host for member in members))
    local_ranks = [other for other, member in enumerate(members) if member.peer.host == host_identity()]
    return replace(
        before,
        rank=rank,
        world_size=len(members),
        local_rank=local_ranks.index(rank),
        local_world_size=len(local_ranks),
        node_rank=hosts.index(host_identity()),
        num_nodes=len(hosts),
    )

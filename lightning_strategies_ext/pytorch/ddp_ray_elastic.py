"""DDPRayElasticStrategy: workers on a Ray cluster, which may be lost, with their host. Name ``ddp_ray_elastic_ext``.

It is both of what it inherits from. What differs from elastic training on one host: ranks may be on several, so that
local ranks and the backend are those of each world, and a host may go without a word, of which the main process tells.
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
from lightning_strategies_ext.torch_distributed.disconnect import disconnect

if TYPE_CHECKING:
    from lightning_strategies_ext.launch.ray.actor import MainLink  # whose modules Windows does not have


class DDPRayElasticStrategy(DDPSpawnElasticStrategy, DDPRayStrategy):
    """Data parallelism in workers on a Ray cluster, of which one may be lost during ``fit``, alone or with its host.

    The others go back to the newest commit and go on, with fewer ranks; meanwhile Ray starts another one, in the
    place of the lost one or on another host, and it joins them at a step. Stages other than ``fit`` are those of
    :class:`.DDPRayStrategy`. After ``fit``, the workers end.

    Args:
        *args: Those of :class:`.DDPRayStrategy`.
        **kwargs: Those of :class:`.DDPRayStrategy`, and what :class:`.DDPSpawnElasticStrategy` has beyond others:
            ``min_workers`` (fewer wait for another one, for as long as ``timeout`` says), ``commit_every_n_steps``,
            ``max_restarts``, ``restart_window`` and ``scale_learning_rate``.

    Raises:
        UnavailableHereError: If Ray is not installed.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value or a combination cannot work.

    Example::

        from lightning_strategies_ext import DDPRayStrategy

        trainer = Trainer(strategy=DDPRayStrategy(num_workers=8, address="auto", elastic=True, min_workers=6))
    """

    strategy_name = "ddp_ray_elastic_ext"
    _may_change = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if is_client_address(self._address):
            raise ValueError(
                f"`address={self._address!r}` with `elastic=True`: workers meet in the main process, which they cannot"
                " reach through Ray Client. Run the script in the cluster, or leave `elastic` out."
            )
        self.restart_policy = replace(self.restart_policy, wait_timeout_s=self._wait_s)

    # --- in a worker ---

    @override
    def enter_worker(self, context: WorkerContext) -> None:
        """Called first in a worker, see :class:`.DDPRayStrategy`; it hears of the loss of others from here on."""
        super().enter_worker(context)
        if context.channel is not None:
            cast("MainLink", context.channel).on_peer_loss = self._cut_off

    @override
    def _be_one_of_many(self) -> None:
        launching.say_rank(self.global_rank)  # that of its WorkerRankInfo

    @override
    def _be_rank(self, rank: int, world_size: int) -> None:
        assert self._worker is not None
        assert self._worker.rank_info is not None
        members = self.membership.members
        self._set_rank_info(_rank_info_among(members, rank, self._worker.rank_info), self.root_device)
        launching.say_rank(rank)

    @override
    def _disconnect(self) -> None:
        disconnect(self._others, by_host=False)  # some connections to other hosts are Ray's

    def _cut_off(self, world: int) -> None:
        """Wakes this rank, which may wait for one that is gone without a word; in a thread of its own."""
        membership = self._membership
        if membership is not None and membership.is_member_of(world):
            self._disconnect()


def _rank_info_among(members: Sequence[Member], rank: int, before: WorkerRankInfo) -> WorkerRankInfo:
    """The rank info of a rank of a world: ranks of one host are its local ranks, numbered through."""
    hosts = list(dict.fromkeys(member.peer.host for member in members))
    here = [other for other, member in enumerate(members) if member.peer.host == host_identity()]
    return replace(
        before,
        rank=rank,
        world_size=len(members),
        local_rank=here.index(rank),
        local_world_size=len(here),
        node_rank=hosts.index(host_identity()),
        num_nodes=len(hosts),
    )

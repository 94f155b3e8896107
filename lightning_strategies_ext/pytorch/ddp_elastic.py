"""DDPElasticStrategy: ``fit`` continues from the newest commit when torchrun restarts ranks. Name ``ddp_elastic_ext``.

:mod:`lightning_strategies_ext.elastic` implements commits and their restoration, and :mod:`.elastic.fd_store` stores
them. This module is the front end for ranks that torchrun starts.
"""

import os
import sys
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.checks import check_flag
from lightning_strategies_ext.elastic.arguments import check_commit_interval
from lightning_strategies_ext.elastic.fd_store import RUN_ID_VARIABLE, FdStoreClient, TorchrunJob
from lightning_strategies_ext.elastic.fit import next_fit_number
from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.elastic.memfd_commit import MemfdCommit
from lightning_strategies_ext.elastic.torchrun_membership import TorchrunMembership
from lightning_strategies_ext.pytorch.ddp import DDPStrategy
from lightning_strategies_ext.pytorch.elastic import ElasticStrategy, is_fitting
from lightning_strategies_ext.registry import StrategyUnavailableError


class DDPElasticStrategy(ElasticStrategy, DDPStrategy):
    """DDP under ``torchrun --max-restarts``: restarted ranks continue from a commit in the host's memory.

    The script needs no changes. When a rank is lost, the other ranks exit and torchrun restarts all of them. ``fit``
    continues from the newest commit that any rank finds on its host, with the remaining samples of the epoch.
    ``ckpt_path`` is used only if no host has a commit: at the first start, or if the process that stores them has
    exited.

    Args:
        *args: Arguments of :class:`.DDPStrategy`.
        commit_every_n_steps: Number of optimizer steps between commits, which ranks restore after a failure; 100 if
            None.
        scale_learning_rate: Whether to scale learning rates with the number of ranks; a callback takes precedence.
        uneven_inputs: Reaction to different numbers of training batches. "stop" ends the epoch with the first rank that
            runs out, "join" trains on all batches. See :mod:`.uneven.control`.
        **kwargs: Arguments of :class:`.DDPStrategy` except ``start_method``.

    Raises:
        RuntimeError: If torchrun has not started this process.
        TypeError: If an argument has the wrong type.
        ValueError: If a value or a combination of values is invalid.

    Example::

        # torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py
        trainer = Trainer(strategy="ddp_elastic_ext", accelerator="cpu", devices=2)
    """

    strategy_name = "ddp_elastic_ext"

    def __init__(
        self,
        *args: Any,
        commit_every_n_steps: int | None = None,
        scale_learning_rate: bool = False,
        uneven_inputs: Literal["stop", "join"] = "join",
        **kwargs: Any,
    ) -> None:
        self._commit_every_n_steps = check_commit_interval(commit_every_n_steps)
        self._scale_learning_rate = check_flag("scale_learning_rate", scale_learning_rate)
        if kwargs.get("start_method", "popen") != "popen":
            raise ValueError(
                f"`start_method={kwargs['start_method']!r}`: torchrun starts the ranks of {type(self).__name__}. Omit"
                " the argument, or use `DDPSpawnStrategy(elastic=True)`, whose workers `fit` starts."
            )
        super().__init__(*args, uneven_inputs=uneven_inputs, **kwargs)  # type: ignore[misc]  # not among `args`
        self._membership: TorchrunMembership | None = None
        self._job = self._find_job()
        self._fd_store: FdStoreClient | None = None

    def _find_job(self) -> TorchrunJob:
        if sys.platform != "linux":
            raise StrategyUnavailableError(
                f"`strategy='{self.strategy_name}'` requires Linux, on which commits are stored for restarted"
                " ranks. Use `strategy='ddp_ext'` with a ModelCheckpoint."
            )
        job = TorchrunJob.this_process()
        if job is None:
            raise StrategyUnavailableError(
                f"`strategy='{self.strategy_name}'`: torchrun did not start this process ({RUN_ID_VARIABLE} is not"
                " set). Use `torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py`, or"
                " `strategy='ddp_spawn_elastic_ext'`, which needs no torchrun."
            )
        return job

    @property  # type: ignore[explicit-override]  # mypy does not recognize it on a property with a setter
    def num_nodes(self) -> int:
        """Number of hosts according to torchrun; the Trainer's argument may be outdated after a restart."""
        return int(os.environ["GROUP_WORLD_SIZE"])

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        pass

    @property
    @override
    def membership(self) -> TorchrunMembership:
        """Membership of this rank, during ``fit``."""
        if self._membership is None:
            raise RuntimeError("`membership` is available only on the ranks of `fit`, while it runs.")
        return self._membership

    @override
    def _begin_stage(self, trainer: "pl.Trainer") -> None:
        if not is_fitting(trainer):
            super()._begin_stage(trainer)
            return
        if self._fd_store is None:
            self._fd_store = FdStoreClient(self._job)
        number = next_fit_number()
        rank_info = self.global_rank, self.world_size, self.local_rank, self.num_processes
        commit = MemfdCommit(self._fd_store, number, *rank_info)
        fit_number = number if commit.batches >= 0 else 0  # without a commit
        peer = Peer.this_process(self.global_rank)
        own_member = Member(peer, fit_number, commit.batches, commit.step, commit.steps_done)
        self._membership = TorchrunMembership(
            [self.collectives.broadcast(own_member, rank) for rank in range(self.world_size)]
        )
        has_begun = any(member.committed_batches >= 0 for member in self._membership.members)
        if not has_begun and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            rank_zero_info(
                "No host has a commit of this `fit`, so it starts from the beginning, or from its `ckpt_path`."
            )
        self._make_fit(trainer, number, commit, has_begun=has_begun)

    @override
    def apply_rank(self) -> None:
        """A no-op: torchrun assigns one rank to this process for its lifetime."""

    @override
    def enter_world(self, trainer: "pl.Trainer") -> None:
        """Starts the agreements and the gradient exchange of a world. Collective: all its ranks call it."""
        self._reset_repeating_loaders(trainer)
        super()._begin_stage(trainer)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fd_store": None, "_membership": None}

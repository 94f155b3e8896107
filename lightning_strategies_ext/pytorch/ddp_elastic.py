"""DDPElasticStrategy: ``fit`` goes on where it stood when torchrun starts its ranks anew. Name ``ddp_elastic_ext``.

What a commit is and how ranks take one on is :mod:`lightning_strategies_ext.elastic`'s; :mod:`.elastic.keeper` keeps
it. This is its face, for ranks that torchrun starts.
"""

import os
import sys
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_strategies_ext._system.peers import Peer
from lightning_strategies_ext.checks import check_flag
from lightning_strategies_ext.elastic.fit import ElasticFit, next_fit_number
from lightning_strategies_ext.elastic.keeper import RUN_ID, Job, Keeper
from lightning_strategies_ext.elastic.kept import KeptCommit
from lightning_strategies_ext.elastic.membership import Member
from lightning_strategies_ext.elastic.options import check_can_change, check_commit_interval
from lightning_strategies_ext.elastic.restarted import RestartedMembership
from lightning_strategies_ext.pytorch.ddp import DDPStrategy
from lightning_strategies_ext.pytorch.elastic import Elastic, is_fitting
from lightning_strategies_ext.registry import UnavailableHereError


class DDPElasticStrategy(Elastic, DDPStrategy):
    """DDP under ``torchrun --max-restarts``: ranks that are started anew go on from a commit in the host's memory.

    Nothing is to be said in the script. When a rank is lost, the others end, torchrun starts all of them again, and
    ``fit`` goes on from the newest commit that any of them finds on its host, with the samples of the epoch that are
    left. A ``ckpt_path`` counts where no host has one: at the first start, or when the process is gone that keeps them.

    Args:
        *args: Those of :class:`.DDPStrategy`.
        commit_every_n_steps: Optimizer steps between copies of the state, to which ranks go back. 100 by default.
        scale_learning_rate: Whether learning rates follow the number of ranks, unless a callback says so.
        **kwargs: Those of :class:`.DDPStrategy`, but for ``start_method``.

    Raises:
        RuntimeError: If torchrun has not started this process.
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value or a combination cannot work.

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
        **kwargs: Any,
    ) -> None:
        self._commit_every_n_steps = check_commit_interval(commit_every_n_steps)
        self._scale_learning_rate = check_flag("scale_learning_rate", scale_learning_rate)
        if kwargs.get("start_method", "popen") != "popen":
            raise ValueError(
                f"`start_method={kwargs['start_method']!r}`: torchrun starts the ranks of {type(self).__name__}. Leave"
                " it out, or use `DDPSpawnStrategy(elastic=True)`, whose workers `fit` starts."
            )
        kwargs.setdefault("uneven_inputs", "join")
        super().__init__(*args, **kwargs)
        self._fit: ElasticFit | None = None
        self._membership: RestartedMembership | None = None
        self._job = self._find_job()
        self._keeper: Keeper | None = None

    @override
    def _check_exchange(self, uneven_inputs: str, ddp_kwargs: dict[str, Any]) -> None:
        # First: what follows would advise another `uneven_inputs`, with which this could not be either.
        check_can_change(uneven_inputs, self._gradient_sync.averages_models)
        super()._check_exchange(uneven_inputs, ddp_kwargs)

    def _find_job(self) -> Job:
        if sys.platform != "linux":
            raise UnavailableHereError(
                f"`strategy='{self.strategy_name}'` needs Linux, which can keep memory for others."
            )
        job = Job.of_this_process()
        if job is None:
            raise UnavailableHereError(
                f"`strategy='{self.strategy_name}'`: torchrun has not started this process ({RUN_ID} is not set). Use"
                " `torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py`, or"
                " `strategy='ddp_spawn_elastic_ext'`, which needs no torchrun."
            )
        return job

    @property  # type: ignore[explicit-override]  # which mypy does not see beside a setter
    def num_nodes(self) -> int:
        """Number of hosts, as torchrun says it: what the Trainer was told may have been so when the job began."""
        return int(os.environ["GROUP_WORLD_SIZE"])

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        pass

    @property
    @override
    def membership(self) -> RestartedMembership:
        """Who the ranks are; in ``fit``."""
        if self._membership is None:
            raise RuntimeError("`membership` is known only to the ranks of `fit`, while it runs.")
        return self._membership

    @override
    def _begin_stage(self, trainer: "pl.Trainer") -> None:
        if not is_fitting(trainer):
            super()._begin_stage(trainer)
            return
        if self._keeper is None:
            self._keeper = Keeper(self._job)
        number = next_fit_number()
        place = self.global_rank, self.world_size, self.local_rank, self.num_processes
        commit = KeptCommit(self._keeper, number, *place)
        mine = Member(Peer.this_process(self.global_rank), number, commit.batches, commit.step, commit.done)
        mine = mine if commit.batches >= 0 else replace(mine, fit=0)
        self._membership = RestartedMembership(
            [self.collectives.broadcast(mine, rank) for rank in range(self.world_size)]
        )
        has_begun = any(member.batches >= 0 for member in self._membership.members)
        if not has_begun and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            rank_zero_info("No host has a commit of this `fit`: it begins as the script says, with its `ckpt_path`.")
        self._make_fit(trainer, number, commit, has_begun=has_begun)

    @override
    def take_rank(self) -> None:
        """This process is the rank that torchrun says, from its start to its end."""

    @override
    def enter_world(self, trainer: "pl.Trainer") -> None:
        """Begins what the ranks of a world do together."""
        super()._begin_stage(trainer)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_keeper": None, "_membership": None}

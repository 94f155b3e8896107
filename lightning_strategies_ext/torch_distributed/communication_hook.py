"""Features for communication hooks: registration of a model's hook, and torch's post-local SGD."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_strategies_ext.torch_distributed.compression.local_sgd import check_is_not_sharded
from lightning_strategies_ext.torch_distributed.feature import Feature, FeatureContext
from lightning_strategies_ext.torch_distributed.gradient_exchange import Contribution, register_hook


class CommunicationHook(Feature):
    """Registers the user's hook with a model, and the hook with which a rank may contribute nothing.

    Args:
        hook: Hook that averages a bucket of gradients; DDP's all-reduce if None.
        state: First argument of the hook.
        contribution: Contribution of this rank; None if all ranks always contribute.
    """

    def __init__(
        self, hook: Callable[..., Any] | None, state: object | None, contribution: Contribution | None
    ) -> None:
        self._hook = hook
        self._state = state
        self._contribution = contribution

    @classmethod
    def create(cls, context: FeatureContext) -> Self | None:
        """Returns the feature, or None if it is not in use. Compression registers its own hook."""
        options, hook = context.options, context.options.comm_hook
        if options.compression is not None or (hook is None and context.contribution is None):
            return None
        if hook is not None:
            hook = hook if options.comm_wrapper is None else options.comm_wrapper(hook)
            hook = hook if context.device.type == "cuda" else _renamed(hook)
        return cls(hook, options.comm_state, context.contribution)

    @override
    def wrap(self, model: DistributedDataParallel) -> None:
        register_hook(model, self._hook, self._state, self._contribution)

    @override
    def after_rebuild(self, model: DistributedDataParallel) -> None:
        self.wrap(model)


class PostLocalSGD(Feature):
    """Averages the parameters of each optimizer over ranks, each time after a number of steps of that optimizer.

    The schedule is post-local SGD's (Lin et al. 2020, https://arxiv.org/abs/1808.07217): gradients are exchanged
    in the first ``start_localSGD_iter`` steps, afterwards only models, periodically.

    Args:
        period: Number of steps of an optimizer between two averagings.
        state: State that defines when averaging starts.
        num_local_ranks: Number of ranks per host, which still exchange gradients if the state specifies no group.
    """

    def __init__(self, period: int, state: PostLocalSGDState, num_local_ranks: int) -> None:
        self._period = period
        self._state = state
        self._num_local_ranks = num_local_ranks
        self._averagers: dict[int, PeriodicModelAverager] = {}

    @classmethod
    def create(cls, context: FeatureContext) -> Self | None:
        """Returns the feature, or None if it is not in use."""
        state, period = context.options.comm_state, context.options.averaging_period
        if not isinstance(state, PostLocalSGDState) or period is None:
            return None
        return cls(period, state, context.num_local_ranks)

    @override
    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Creates an averager for each optimizer.

        Raises:
            ValueError: If an optimizer distributes its own work and would undo the averaging.
        """
        state = self._state
        if state.subgroup is None and state.post_local_gradient_allreduce:
            # torch would create groups of as many ranks as the host has GPUs, which is zero on a CPU host.
            state.subgroup, _ = dist.new_subgroups(group_size=self._num_local_ranks)
        for optimizer in optimizers:
            check_is_not_sharded(optimizer, f"model_averaging_period={self._period}")
            # One averager per optimizer: a shared averager would count the steps of all optimizers together, and never
            # average some of them.
            self._averagers[id(optimizer)] = PeriodicModelAverager(
                period=self._period, warmup_steps=state.start_localSGD_iter, process_group=state.process_group
            )

    @override
    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Counts a step of ``optimizer`` and averages its parameters if an averaging is due."""
        averager = self._averagers.get(id(optimizer))
        if averager is not None:
            averager.average_parameters(
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.requires_grad
            )


def _renamed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the hook under another name: torch rejects its bf16 hooks, by name, unless it was built with NCCL.

    gloo also reduces bfloat16 (torch 2.5 to 2.13).
    """

    def exchange(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        return future

    return exchange

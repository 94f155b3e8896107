"""ParallelStrategy: what every multi-process strategy of the Trainer does the same way.

It promises ranks, collectives, the handling of a SIGTERM and of a failing rank. How processes start and how gradients
are exchanged is left to the strategies; what carries the collectives is an engine (``collectives``), by default
torch.distributed, and nothing else here knows which.
"""

import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy as LightningParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_strategies_ext import _lightning, registry
from lightning_strategies_ext.collectives import Collectives, TorchCollectives
from lightning_strategies_ext.failure.departure import Departure
from lightning_strategies_ext.failure.errors import UnevenInputsError
from lightning_strategies_ext.failure.reconciliation import Reconciliation
from lightning_strategies_ext.failure.termination import TerminationAgreement

T = TypeVar("T")


class ParallelStrategy(LightningParallelStrategy, ABC):
    """Base of the Trainer's strategies with several processes.

    A class that works on Lightning's ``ParallelStrategy`` works on this one. Of what is abstract there, ``root_device``
    and ``model_to_device`` are left to it; the collectives it may leave to torch.distributed or bring itself.

    Args:
        accelerator: As chosen by ``Trainer(accelerator=...)`` if None.
        parallel_devices: Devices of this host, one per process. As chosen by ``Trainer(devices=...)`` if None.
        cluster_environment: Where ranks and addresses come from; detected if None.
        checkpoint_io: How checkpoints are written.
        precision_plugin: As chosen by ``Trainer(precision=...)`` if None.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If ``parallel_devices`` mixes device types, repeats a GPU or names one that is not there.

    Example::

        class MyStrategy(lightning_strategies_ext.ParallelStrategy):
            @property
            def root_device(self):
                return self.parallel_devices[self.local_rank]

            def model_to_device(self):
                self.model.to(self.root_device)
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_plugins(accelerator, cluster_environment, checkpoint_io)
        if precision_plugin is not None and not isinstance(precision_plugin, Precision):
            raise TypeError(f"`precision_plugin` must be a Precision of lightning.pytorch, got {precision_plugin!r}.")
        check_devices(parallel_devices)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._collectives: Collectives | None = None
        self._termination: TerminationAgreement | None = None
        self._reconciliation: Reconciliation | None = None
        self._departure: Departure | None = None
        self._has_failed = False
        self._was_asked_to_stop = False
        self._is_interrupted = False

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """The device of this rank."""

    @property
    def collectives(self) -> Collectives:
        """What carries this strategy's collectives: torch.distributed's default group, once this process is in one.

        In a process that is in none, each returns its input.
        """
        if self._collectives is None:
            self._collectives = TorchCollectives(lambda: self.root_device)
        return self._collectives

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process with rank zero among all hosts."""
        return bool(self.global_rank == 0)

    # --- steps ---

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keeps the backward passes inside it from exchanging gradients; they add up locally instead.

        The first backward pass after it exchanges the sum. Does nothing but for a model that is wrapped in DDP.
        """
        with super().block_backward_sync():
            yield

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one validation step; before it all ranks stop if they agreed to."""
        self._stop_before_evaluation_step_if_agreed()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one test step; before it all ranks stop if they agreed to."""
        self._stop_before_evaluation_step_if_agreed()
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one predict step; before it all ranks stop if they agreed to."""
        self._stop_before_evaluation_step_if_agreed()
        return super().predict_step(*args, **kwargs)

    # --- collectives ---

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over ranks in one round trip, see :meth:`.Collectives.reduce`.

        Args:
            tensor: Any shape and dtype, the same on all ranks; what is not a tensor is returned unchanged.
            group: Ranks that take part, default all.
            reduce_op: "mean" or "avg", "sum", "min", "max", "product", or a ``torch.distributed.ReduceOp``.

        Returns:
            The reduced value. The input may have been overwritten with it.

        Raises:
            ValueError: If ``reduce_op`` is unknown.
        """
        return tensor if self._has_failed else self.collectives.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers one tensor per rank into a tensor of shape ``(world_size, ...)``.

        Args:
            tensor: Shape ``(...)``, the same on all ranks.
            group: Ranks that take part, default all.
            sync_grads: Whether gradients flow back through the result, to every rank's input.
        """
        if self._has_failed:
            return torch.stack([tensor] * self.world_size)
        return self.collectives.all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Gives every rank the object of rank ``src``, any picklable one; small ones in one round trip.

        Raises:
            ValueError: If there is no such rank.
            RuntimeError: On every rank, if the object cannot be pickled.
        """
        return obj if self._has_failed else self.collectives.broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Returns when every rank has called it.

        Args:
            *args: The first is a name, shown in the error if it fails. There is no use for others.
            **kwargs: ``name`` is the same.
        """
        if not self._has_failed:
            self.collectives.barrier(name_of_barrier(*args, **kwargs))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Agrees on a decision: whether all ranks say yes, or with ``all=False`` whether any does.

        A subclass that brings ``reduce``, and no ``collectives``, decides by that, as on Lightning's base.
        """
        if self._has_failed:
            return bool(decision)
        own = type(self)
        if own.reduce is not ParallelStrategy.reduce and own.collectives is ParallelStrategy.collectives:
            return bool(super().reduce_boolean_decision(decision, all))
        return self.collectives.reduce_boolean_decision(decision, all)

    # --- exception, teardown ---

    def request_interrupt(self) -> None:
        """Lets all ranks stop before the same step, as after Ctrl-C; for the signal handler of a worker process.

        Raises:
            KeyboardInterrupt: If no stage runs that could agree on a step.
        """
        if self._termination is None:
            raise KeyboardInterrupt
        self._is_interrupted = True
        self._termination.request()

    def note_failure(self, exception: BaseException) -> None:
        """Says to the other ranks that this one has failed; called before any ``on_exception`` hook.

        From here to the next stage the collectives of this rank return its own values: no other rank takes part, and a
        callback that saves a checkpoint would wait in a barrier for ever. An agreed SIGTERM is no failure, and the
        Tuner's way out of a trial is none either.
        """
        if isinstance(exception, (SIGTERMException, _lightning.TunerExitException)):
            return
        self._has_failed = True
        if self._reconciliation is not None and isinstance(exception, Exception):
            self._reconciliation.announce("".join(traceback.format_exception(exception)))

    def explained(self, exception: BaseException) -> BaseException:
        """The exception that the user should see: the given one, or one that it came from by way of a collective."""
        if self._departure is None or self._departure.reason is None or not isinstance(exception, Exception):
            return exception
        error = UnevenInputsError(self._departure.reason)
        error.__cause__ = exception
        return error

    def reconciliate_processes(self, trace: str) -> None:
        """Ends the other ranks of this host after this one failed, so that none waits for it.

        Ranks that end by themselves within a few seconds are left to; the others are killed and ``trace`` is shown.
        Does nothing where there are no other ranks.

        Args:
            trace: The failure of this rank, as ``traceback.format_exc()`` gives it.
        """
        if self._reconciliation is not None:
            self._reconciliation.reconciliate(trace)

    def on_exception(self, exception: BaseException) -> None:
        """Ends the other ranks if this one failed. Ctrl-C and an agreed SIGTERM end all ranks and are no failures."""
        if self._reconciliation is None or not isinstance(exception, Exception):
            return
        first = self._reconciliation.first_failure()
        if first is not None and hasattr(exception, "add_note"):  # Python 3.11 and later
            exception.add_note(first)
        trace = "".join(traceback.format_exception(exception))
        self.reconciliate_processes(trace)

    def teardown(self) -> None:
        """Moves the model off the device and frees what the strategy holds. A second call does no harm."""
        if self._departure is not None:
            self._departure.close() if self._has_failed else self._departure.depart()
        if self._termination is not None:
            self._termination.close()
            # A request that came after the last step, while a checkpoint was saved, say, is for the next stage.
            self._was_asked_to_stop = self._termination.is_unanswered
            self._termination = None
            module = self.lightning_module
            trainer = None if module is None else _lightning.trainer_of(module)
            if trainer is not None:
                _lightning.release_sigterm(trainer)
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        _lightning.move_optimizers(self.optimizers, torch.device("cpu"))
        if self.lightning_module is not None:
            self.lightning_module.cpu()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _agree_on_sigterm(self, trainer: "pl.Trainer", agreement: TerminationAgreement) -> None:
        """Lets ``agreement`` decide what a SIGTERM on any rank does to this stage; called by all ranks in ``setup``."""
        if self._termination is not None:
            self._termination.close()
        self._termination = agreement
        self._confirm_sigterm = _lightning.intercept_sigterm(trainer, self._on_sigterm, self._before_train_step)

    def _on_sigterm(self) -> None:
        if self._termination is not None:
            self._termination.request()

    def _before_train_step(self) -> None:
        if self._termination is not None and self._termination.must_stop_before_train_step():
            self._stop()

    def _stop_before_evaluation_step_if_agreed(self) -> None:
        if self._termination is not None and self._termination.must_stop_before_evaluation_step():
            self._stop()

    def _stop(self) -> None:
        if self._is_interrupted:
            raise KeyboardInterrupt
        self._confirm_sigterm()
        raise SIGTERMException

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        # They belong to this process: a worker has its own.
        state.update(_collectives=None, _termination=None, _reconciliation=None, _departure=None)
        state.pop("_confirm_sigterm", None)
        return state

    def __repr__(self) -> str:
        return registry.describe(self)


def name_of_barrier(*args: Any, **kwargs: Any) -> str | None:
    """The name among the arguments of ``barrier(*args, **kwargs)``, or None."""
    name = kwargs.get("name", args[0] if args else None)
    return None if name is None else str(name)


def check_plugins(accelerator: Any, cluster_environment: Any, checkpoint_io: Any) -> None:
    """Refuses plugins that are not what their argument says.

    Raises:
        TypeError: If one is not.
    """
    from lightning.fabric.accelerators import Accelerator as AnyAccelerator

    for name, value, kind in (
        ("accelerator", accelerator, AnyAccelerator),
        ("cluster_environment", cluster_environment, ClusterEnvironment),
        ("checkpoint_io", checkpoint_io, CheckpointIO),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"`{name}` must be a {kind.__module__.rpartition('.')[0]}.{kind.__name__}, got {value!r}.")


def check_not_interactive(way: str) -> None:
    """Refuses, in a notebook or at a prompt, a way of starting processes that needs a script.

    Lightning refuses it too, but later, and recommends its own strategy in place of ours.

    Args:
        way: The argument that asks for it, as the user writes it.

    Raises:
        RuntimeError: If this is a notebook, a prompt or ``python -i``.
    """
    if hasattr(sys, "ps1") or sys.flags.interactive:
        raise RuntimeError(
            f"{way} does not work in a notebook or at a prompt: new processes would run or import a script. Use"
            " `strategy='ddp_notebook_ext'` or `DDPStrategy(start_method='fork')`, which fork; or `strategy='dp_ext'`,"
            " which starts no process; or run a script."
        )


def check_devices(devices: Any) -> None:
    """Refuses a list of devices that no host could give to one process each.

    Raises:
        TypeError: If it is not a list of ``torch.device``.
        ValueError: If it mixes types, repeats a GPU or names one that is not there.
    """
    if devices is None:
        return
    if not isinstance(devices, (list, tuple)) or not all(isinstance(device, torch.device) for device in devices):
        raise TypeError(f"`parallel_devices` must be a list of torch.device, got {devices!r}.")
    types = {device.type for device in devices}
    if len(types) > 1:
        raise ValueError(f"`parallel_devices` must be of one type, got {', '.join(sorted(types))}.")
    if types != {"cuda"}:
        return
    indices = [device.index for device in devices]
    if len(set(indices)) < len(indices):
        raise ValueError(f"`parallel_devices={devices}` gives the same GPU to two processes. Name each once.")
    count = torch.cuda.device_count()
    missing = [index for index in indices if index is None or index >= count]
    if missing:
        raise ValueError(f"`parallel_devices={devices}`: this host has {count} GPUs, with indices from 0.")

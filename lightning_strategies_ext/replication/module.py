"""ReplicatedModule: runs a module's methods on replicas, each with a part of the batch.

``ReplicatedModule`` is a subclass of ``torch.nn.DataParallel``, so that ``isinstance`` checks for that class succeed.
Unlike that class, it also runs on the CPU, weights results by the sizes of the parts, and runs actions for the whole
batch once. The arguments are checked for the strategies of both the Trainer and Fabric.
"""

import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.nn import DataParallel, Module
from torch.nn.parameter import is_lazy

from lightning_strategies_ext._lightning import user_modules
from lightning_strategies_ext.checks import is_compiled
from lightning_strategies_ext.replication.context import ReplicaContext, ReplicaStep
from lightning_strategies_ext.replication.denominators import denominator_of
from lightning_strategies_ext.replication.gathering import gather
from lightning_strategies_ext.replication.lockstep import Lockstep
from lightning_strategies_ext.replication.number_scopes import NumberScopes
from lightning_strategies_ext.replication.replicas import Replicas, modules_to_copy
from lightning_strategies_ext.replication.splitting import BatchPart, count_samples, split, split_like

#: Function that splits a batch into at most the given number of parts, and returns them with their numbers of samples.
Scatter = Callable[[Any, int], Sequence[tuple[Any, int]]]


class ReplicatedModule(DataParallel[Module]):
    """A module and its replicas.

    Args:
        module: Module on the first device.
        devices: Device of each replica; for replicas on the CPU, one entry per replica.
        scatter: Function that splits a batch, in place of the rules of :mod:`.splitting`.
        sequential: Whether replicas run sequentially; None for True on the CPU and False on other devices.
        sync_batchnorm: Whether batch normalization uses the statistics of the whole batch.

    Raises:
        ValueError: If the module cannot be replicated.
    """

    def __init__(
        self,
        module: Module,
        devices: Sequence[torch.device],
        scatter: Scatter | None = None,
        sequential: bool | None = None,
        sync_batchnorm: bool = False,
    ) -> None:
        Module.__init__(self)  # `DataParallel.__init__` supports only GPUs
        check_can_be_replicated(module, len(devices))
        # Attributes of `DataParallel`, which other code may read.
        self.module = module
        self.dim = 0
        self.device_ids = [device.index for device in devices if device.index is not None]
        self.src_device_obj = devices[0]

        self._devices = list(devices)
        self._scatter = scatter
        self._is_sequential = devices[0].type == "cpu" if sequential is None else sequential
        self._sync_batchnorm = sync_batchnorm
        self._replicas = Replicas(module, devices, sync_batchnorm)
        self._number_scopes = NumberScopes(len(devices))
        self._is_running = False
        self._lockstep: Lockstep | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with each part of the inputs, and gathers the results.

        ``scatter`` splits the first positional argument. Without one, the rules of :mod:`.splitting` apply to the
        keyword arguments.

        Raises:
            ValueError: If the inputs cannot be split, or the results cannot be gathered.
        """
        # Fabric may have redirected `forward` to another method, such as `training_step`.
        method = user_modules.pop_forward_redirection(self.module) or "__call__"
        if len(self._devices) == 1:
            return getattr(self.module, method)(*args, **kwargs)
        if self._scatter is not None and args:  # `run` splits the first argument, and the others like it
            return self.run(method, *args, **kwargs)
        if not args and not kwargs:  # nothing to split: one replica
            return self._run_parts(method, [BatchPart(((), {}), 0)])
        if len(args) == 1 and not kwargs:
            return self.run(method, *args)
        return self._run_parts(method, split((args, kwargs), len(self._devices), "inputs"))

    def run(self, method: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the module with each part of a batch, and gathers the results.

        Args:
            method: Name of the method.
            batch: First argument of the method, which is split.
            *args: Other positional arguments. With ``scatter``, those with one entry per sample are split, too.
            **kwargs: Keyword arguments, which are split like positional arguments.

        Raises:
            ValueError: If the batch cannot be split, or the results cannot be gathered.
        """
        if len(self._devices) == 1:
            return getattr(self.module, method)(batch, *args, **kwargs)
        if self._scatter is None:
            parts = split(batch, len(self._devices), "batch")
            return self._run_parts(
                method, [BatchPart(((part.value, *args), kwargs), part.num_samples) for part in parts]
            )
        scattered = check_parts(self._scatter(batch, len(self._devices)), len(self._devices))
        others = split_like((args, kwargs), [size for _, size in scattered], "inputs")
        calls = [
            BatchPart(((value, *positional), named), size)
            for (value, size), (positional, named) in zip(scattered, others, strict=True)
        ]
        return self._run_parts(method, calls, [count_samples_or(size, value) for value, size in scattered])

    def close(self) -> None:
        """Stops the threads; the next call starts new ones."""
        if self._finalizer is not None:
            self._finalizer()
        self._lockstep = self._finalizer = None

    def _run_parts(self, method: str, parts: Sequence[BatchPart], lengths: Sequence[int] | None = None) -> Any:
        """Calls a method of each replica with the arguments in its part, and gathers the results.

        Args:
            method: Name of the method.
            parts: Arguments of each replica.
            lengths: Number of entries of lists with one entry per sample; the parts' numbers of samples if None.
        """
        if self._is_running:
            raise RuntimeError(
                "A step calls the module that runs on replicas, from within a replica. Call `self(...)` or a method of"
                " `self`, which is the replica's own module."
            )
        self._is_running = True
        try:
            return self._run_replicas(method, parts, lengths)
        finally:
            self._is_running = False

    def _run_replicas(self, method: str, parts: Sequence[BatchPart], lengths: Sequence[int] | None) -> Any:
        root_device = self._devices[0]
        sizes = [part.num_samples for part in parts]
        lockstep, replicas = self._get_lockstep(), self._replicas
        step = ReplicaStep(
            lockstep, root_device, sizes, self._number_scopes, replicas.check_writes, replicas.refresh, lengths
        )
        for participant, device, part in zip(lockstep.participants, self._devices, parts, strict=False):
            step.contexts.append(ReplicaContext(step, participant, device, part.num_samples))
        try:
            calls = [
                _bind(getattr(replica, method), part, context.device)
                for replica, part, context in zip(replicas.create(step.contexts), parts, step.contexts, strict=True)
            ]
            outputs = lockstep.run(calls)
            step.end()
            if step.has_copies:
                outputs = step.with_shared_results(outputs)
            if method == "training_step":
                if step.other_batch_sizes is not None:
                    losses = [output.get("loss") if isinstance(output, dict) else output for output in outputs]
                    step.warn_of_loss([denominator_of(loss) for loss in losses if loss is not None])
                outputs = [with_scalar_loss(output) for output in outputs]
            replicas.merge_changes(sizes)
        finally:
            replicas.release()
        name = "module(...)" if method == "__call__" else f"{method}(...)"
        return gather(outputs, sizes, root_device, name, lengths)

    def _get_lockstep(self) -> Lockstep:
        if self._lockstep is None:
            self._lockstep = Lockstep(len(self._devices), self._is_sequential)
            self._finalizer = weakref.finalize(self, self._lockstep.close)
        return self._lockstep

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_is_running": False,
            "_lockstep": None,
            "_finalizer": None,
            "_number_scopes": NumberScopes(len(self._devices)),  # its keys contain ids of metrics, which change
            "_replicas": Replicas(self.module, self._devices, self._sync_batchnorm),
        }


def _bind(function: Callable[..., Any], part: BatchPart, device: torch.device) -> Callable[[], Any]:
    """Returns a call of a function with the arguments in a part, for any thread.

    The call applies the thread-local state of torch that the current thread has now: gradient mode, inference mode,
    autocast, current device, and stream.
    """
    args, kwargs = part.value
    if device.type != "cpu":
        args, kwargs = move_data_to_device((args, kwargs), device)
    has_gradients, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast_types = [kind for kind in sorted({"cpu", device.type}) if torch.is_autocast_enabled(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) for kind in autocast_types]
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def call() -> Any:
        with ExitStack() as stack:
            if stream is not None:
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(torch.cuda.stream(stream))
            if is_inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(has_gradients))
            for kind, dtype, caches_casts in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=caches_casts))
            return function(*args, **kwargs)

    return call


def with_scalar_loss(output: Any) -> Any:
    """Returns a training step's output with a loss of one element reshaped to zero dimensions."""
    if isinstance(output, Tensor) and output.ndim and output.numel() == 1:
        return output.reshape(())
    if isinstance(output, dict) and isinstance(loss := output.get("loss"), Tensor) and loss.ndim and loss.numel() == 1:
        return {**output, "loss": loss.reshape(())}
    return output


def check_parts(parts: Any, num_replicas: int) -> list[tuple[Any, int]]:
    """Checks the result of the user's ``scatter`` function, and returns it as a list of tuples.

    Raises:
        TypeError: If the result is not a sequence of pairs.
        ValueError: If it has no parts or too many, or a number of samples is negative.
    """
    if not isinstance(parts, Sequence) or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in parts):
        raise TypeError(
            "`scatter` must return a list of pairs, each with a part of the batch and its number of samples; it"
            f" returned {type(parts).__name__}."
        )
    sizes = [_to_int(size) for _, size in parts]
    for (_, size), integer in zip(parts, sizes, strict=True):
        if integer is None:
            raise TypeError(
                "`scatter` must return a list of pairs, with the number of samples of each part as an integer, not"
                f" {size!r}."
            )
    if not 0 < len(parts) <= num_replicas:
        raise ValueError(
            f"`scatter` returned {len(parts)} parts for {num_replicas} replicas. Return at most one part per replica."
        )
    counts = [size for size in sizes if size is not None]
    if any(size < 0 for size in counts):
        raise ValueError(
            f"`scatter` returned negative numbers of samples: {counts}. Return the number of samples of each part."
        )
    return [(value, size) for (value, _), size in zip(parts, counts, strict=True)]


def _to_int(number: Any) -> int | None:
    """Returns an integer, NumPy integer, or integer tensor of one element as an int; None for other values."""
    try:
        return operator.index(number)
    except TypeError:
        return None


def count_samples_or(default: int, part: Any) -> int:
    """Returns the number of samples of a part that a ``scatter`` function returned, or a default if it is unknown."""
    try:
        return count_samples(part)
    except ValueError:
        return default


def check_can_be_replicated(module: Module, num_replicas: int) -> None:
    """Rejects modules that cannot be replicated correctly.

    Raises:
        ValueError: If a submodule is compiled, a ScriptModule, or has uninitialized lazy parameters.
    """
    if num_replicas == 1:
        return
    for part in modules_to_copy(module):
        if is_compiled(part):  # replicas would share the compiled forward
            raise _unsupported_error(part, "is compiled: its compiled code computes with the module's own weights")
        if isinstance(part, torch.jit.ScriptModule):
            raise _unsupported_error(part, "is a ScriptModule, which torch cannot replicate")
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and is_lazy(tensor):
                raise _unsupported_error(
                    part, "has parameters without a shape (run one sample through the module first)"
                )


def _unsupported_error(module: Module, reason: str) -> ValueError:
    return ValueError(
        f"{type(module).__name__} {reason}. It cannot be trained in one process on several devices. Use `devices=1`,"
        " `strategy='ddp_ext'`, or the plain module."
    )


def check_replica_devices(devices: Sequence[torch.device] | None) -> None:
    """Rejects devices that cannot hold replicas.

    Raises:
        TypeError: If ``devices`` is not a list or tuple of devices.
        ValueError: If ``devices`` is empty, has several types or an unsupported type, or contains a GPU twice.
    """
    if devices is None:
        return
    if not isinstance(devices, (list, tuple)) or not all(isinstance(device, torch.device) for device in devices):
        raise TypeError(f"`parallel_devices` must be a list of torch.device, got {devices!r}.")
    if not devices:
        raise ValueError(
            "`parallel_devices=[]` contains no device for a replica. Pass at least one, or omit the argument."
        )
    kinds = sorted({device.type for device in devices})
    if len(kinds) > 1:
        raise ValueError(f"`parallel_devices` contains {' and '.join(kinds)} devices. Use devices of one type.")
    if len(devices) > 1 and kinds[0] not in ("cpu", "cuda"):
        raise ValueError(
            f"`strategy='dp_ext'` supports replicas on CPUs and CUDA devices, not on {len(devices)} devices of type"
            f" {kinds[0]!r}. Use `devices=1`."
        )
    if kinds[0] == "cuda" and len(set(devices)) < len(devices):
        raise ValueError(f"`parallel_devices={list(devices)}` contains a GPU twice. List each GPU once.")


def check_scatter(scatter: object, sequential: object) -> None:
    """Rejects a ``scatter`` or ``sequential`` of the wrong type.

    Raises:
        TypeError: If an argument has the wrong type.
    """
    if scatter is not None and not callable(scatter):
        raise TypeError(f"`scatter` must be a function of a batch and the number of replicas, got {scatter!r}.")
    if sequential is not None and not isinstance(sequential, bool):
        raise TypeError(f"`sequential` must be True, False or None, got {sequential!r}.")


def check_single_process(num_nodes: int, cluster_environment: ClusterEnvironment | None) -> None:
    """Rejects jobs of several hosts or processes.

    Raises:
        ValueError: If ``num_nodes`` is above 1, or a launcher has started several processes.
    """
    if num_nodes > 1:
        raise ValueError(
            f"`num_nodes={num_nodes}`: `strategy='dp_ext'` is one process on one host. Use `num_nodes=1`, or"
            " `strategy='ddp_ext'`."
        )
    if cluster_environment is None or not cluster_environment.creates_processes_externally:
        return
    if cluster_environment.world_size() > 1:
        raise ValueError(
            f"This script was started as {cluster_environment.world_size()} processes"
            f" ({type(cluster_environment).__name__}), but `strategy='dp_ext'` is one process that uses all devices."
            " Start it once, with `python`, or use `strategy='ddp_ext'`."
        )

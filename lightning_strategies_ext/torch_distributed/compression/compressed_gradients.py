"""Compressed exchange of the gradients of a model in DDP: its communication hook, and its state between steps."""

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self, override

from lightning_strategies_ext._system.gpu_sync import side_stream
from lightning_strategies_ext.torch_distributed.compression.codecs import CastCodec, Codec, Residuals, TopKCodec
from lightning_strategies_ext.torch_distributed.compression.config import (
    STATE_KEY,
    BFloat16,
    Compression,
    Float16,
    LocalSGD,
    PowerSGD,
    TopK,
)
from lightning_strategies_ext.torch_distributed.compression.host_groups import HostGroups
from lightning_strategies_ext.torch_distributed.compression.power_sgd import PowerSGDCodec
from lightning_strategies_ext.torch_distributed.feature import Feature, FeatureContext
from lightning_strategies_ext.torch_distributed.gradient_exchange import (
    all_reduce_async,
    register_hook,
    weak_model_for_hook,
)

#: Number of elements that are cast at once.
_CAST_AT_ONCE = 1 << 20


class CompressedGradients(Feature):
    """Exchange of the compressed gradients of one model, among all ranks of the default group.

    It does not keep the context, which refers to the strategy: the model holds its hook, and thereby this object, in
    C++ objects, in which Python's garbage collector detects no cycle.

    Args:
        compression: Compression of the exchange.
        context: The parts of the strategy that the feature uses.
    """

    state_key = STATE_KEY

    def __init__(self, compression: Compression, context: FeatureContext) -> None:
        self._contribution = context.contribution
        self._world_size = dist.get_world_size()
        self._scale = 1.0 / self._world_size
        self._host_groups = HostGroups.create(context.device, context.timeout)
        self._executor = OrderedExecutor(context.device)
        self._model: DistributedDataParallel
        self._must_wait = False  # for each bucket, before the next one
        self._parameters: dict[str, Tensor] = {}  # all parameters that were trained so far, by name
        self._residuals = Residuals()
        self._warmup_steps = getattr(compression, "warmup_steps", 0)
        self._num_steps = 0
        self._num_bytes = 0
        self._codec: Codec
        self._cast: torch.dtype | None = None
        if isinstance(compression, PowerSGD):
            self._codec = PowerSGDCodec(compression.rank, self._residuals, self._host_groups.ranks_per_host)
        elif isinstance(compression, TopK):
            self._codec = TopKCodec(compression.fraction, self._residuals)
        else:
            self._cast = {BFloat16: torch.bfloat16, Float16: torch.float16}[type(compression)]
            self._codec = CastCodec(self._cast)

    @classmethod
    def create(cls, context: FeatureContext) -> Self | None:
        """Returns the feature, or None if it is not in use, as for a single rank."""
        compression = context.options.compression
        if compression is None or isinstance(compression, LocalSGD) or dist.get_world_size() == 1:
            return None
        return cls(compression, context)

    @property
    @override
    def num_bytes_exchanged(self) -> int:
        """Bytes that this rank has passed to collectives so far; with several ranks per host, those between hosts."""
        return self._num_bytes

    @override
    def wrap(self, model: DistributedDataParallel) -> None:
        self._model = weak_model_for_hook(model)
        self._must_wait = self._host_groups.must_serialize(model)
        self.after_rebuild(model)

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Averages a bucket over all ranks; for ``register_comm_hook``."""
        flat, parameters = bucket.buffer(), bucket.parameters()
        is_warming_up = self._num_steps < self._warmup_steps
        self._num_steps += bucket.is_last()
        if is_warming_up or flat.is_sparse:
            self._num_bytes += (flat._values() if flat.is_sparse else flat).nbytes
            summed = all_reduce_async(flat.mul_(self._scale), self._model.process_group)
            if self._must_wait:
                summed.wait()
            return summed
        if self._cast is not None and self._host_groups.intra_host is None:
            self._num_bytes += flat.numel() * self._cast.itemsize
            return self._cast_and_sum(flat.mul_(self._scale), self._cast)
        future = self._executor.submit(lambda: self._sum(parameters, flat), flat)
        if self._must_wait:
            future.wait()  # only the stream waits, not this thread
        return future

    def _cast_and_sum(self, flat: Tensor, dtype: torch.dtype) -> Future[Tensor]:
        """Sums gradients in a smaller dtype. On CPUs, one piece is cast while another piece is sent."""

        def begin(piece: Tensor) -> Future[Tensor]:
            summed = all_reduce_async(piece.to(dtype), self._host_groups.inter_host)
            return summed.then(lambda cast: piece.copy_(cast.value()))

        if flat.is_cuda:
            return begin(flat)
        begun = [begin(piece) for piece in flat.split(_CAST_AT_ONCE)]
        return torch.futures.collect_all(begun).then(lambda pieces: _all_of(pieces.value(), flat))

    def _sum(self, parameters: Sequence[Tensor], flat: Tensor) -> None:
        groups = self._host_groups
        sizes = [parameter.numel() for parameter in parameters]
        shards = groups.shards(sizes)
        pieces = flat.split([sum(sizes[shard.start : shard.stop]) for shard in shards])
        parts = [parameters[shard.start : shard.stop] for shard in shards]
        for index, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
            if index != groups.local_index:
                self._residuals.add_to_gradients(part, piece, self._world_size)
        own = pieces[groups.local_index]

        def exchange_inter_host() -> None:
            wide = own.to(torch.promote_types(own.dtype, torch.float32))
            self._num_bytes += self._codec.sum(parts[groups.local_index], wide, self._scale, groups.inter_host)
            if wide is not own:
                own.copy_(wide)

        groups.exchange(pieces, exchange_inter_host)

    @override
    def after_rebuild(self, model: DistributedDataParallel) -> None:
        """Includes the gradients of newly trained parameters; the residuals of other parameters are kept."""
        register_hook(model, self.hook, None, self._contribution)
        self._parameters |= {name: each for name, each in model.module.named_parameters() if each.requires_grad}

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all ranks. Collective: all ranks call it, after the last exchange of a step.

        All ranks continue with this state, whether or not it is restored.
        """
        if isinstance(self._codec, CastCodec):
            return {}
        names = {parameter: name for name, parameter in self._parameters.items()}
        totals = self._residuals.gather_totals(
            list(self._parameters.values()), self._host_groups.sum_all, self._world_size
        )
        return {
            "num_steps": self._num_steps,
            "residuals": dict(zip(self._parameters, totals, strict=True)),
            "codec": self._codec.state_dict(names),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "residuals" not in state:  # the state of a run with another compression
            return
        self._num_steps = state["num_steps"]
        for name, total in state["residuals"].items():
            if name in self._parameters:
                self._residuals.distribute(self._parameters[name], total, self._world_size)
        self._codec.load_state_dict(state["codec"], self._parameters)

    @override
    def close(self) -> None:
        """Leaves the process groups of the exchange. A second call is a no-op."""
        self._executor.close()
        self._host_groups.close()


def _all_of(pieces: list[Future[Tensor]], tensor: Tensor) -> Tensor:
    for piece in pieces:
        piece.value()  # raises the exception of a piece that failed
    return tensor


class _QueuedWork(NamedTuple):
    work: Callable[[], None]
    tensor: Tensor
    future: Future[Any]


class OrderedExecutor:
    """Executes exchanges of several collectives in order, concurrently with the backward pass.

    On CPUs, a thread executes them, on GPUs a stream. If each collective were started by the thread that observes the
    end of the previous one, the order would differ between ranks. Ranks would then sum unrelated tensors, or wait
    indefinitely.

    Args:
        device: Device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = side_stream(device) if device.type == "cuda" else None
        self._works: SimpleQueue[_QueuedWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None], tensor: Tensor) -> Future[Tensor]:
        """Executes ``work`` after all work that was submitted before; returns at once.

        Args:
            work: Callable that starts its collectives and waits for them.
            tensor: Tensor that ``work`` writes to, and the value of the future.

        Returns:
            Future with the tensor, or with the exception that ``work`` raises.
        """
        if self._stream is not None:
            return self._in_stream(self._stream, work, tensor)
        future: Future[Any] = Future()
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._works,), name="exchanges", daemon=True)
            self._thread.start()
        self._works.put(_QueuedWork(work, tensor, future))
        return future.then(_value)

    def close(self) -> None:
        """Ends the thread after all submitted work; no work may be submitted afterwards. A second call is a no-op."""
        if self._thread is not None:
            self._works.put(None)

    def _in_stream(self, stream: Any, work: Callable[[], None], tensor: Tensor) -> Future[Tensor]:
        # NCCL's collectives wait in the stream, and this thread continues. Buckets have the same order on all ranks.
        future: Future[Tensor] = Future(devices=[self._device])
        stream.wait_stream(torch.cuda.current_stream(self._device))
        tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            work()
            future.set_result(tensor)
        return future


def _run(works: "SimpleQueue[_QueuedWork | None]") -> None:
    while (queued := works.get()) is not None:
        result: Tensor | Exception = queued.tensor
        try:
            queued.work()
        except Exception as error:
            result = error
        queued.future.set_result(result)
        del queued, result  # otherwise they stay alive until the next work


def _value(done: Future[Any]) -> Tensor:
    # An exception that is raised here reaches a waiting thread in C++, such as DDP's; an exception from `set_exception`
    # does not.
    value = done.value()
    if isinstance(value, Exception):
        raise value
    result: Tensor = value
    return result

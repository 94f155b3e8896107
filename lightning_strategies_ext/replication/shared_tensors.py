"""What replicas share and a step must not write to: parameters, and tensors and arrays that attributes hold.

Where each replica writes to them, the change happens once per replica, or is lost with a copy on another GPU.
torch counts most writes to a tensor. Those through ``parameter.data``, which is how many write the update of a target
network, it does not: on the CPU, where replicas share the parameters themselves, norms tell.

What it does not promise: to notice writes through ``.data`` to parameters on GPUs, where looking would have to wait for
the device, or to tensors that are no parameters; or a change that leaves a parameter's norm as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

_MAX_ARRAY_BYTES = 1 << 20


@dataclass(frozen=True)
class Shared:
    """Something that is shared.

    Attributes:
        value: A tensor or an array.
        origin: The parameter that it is or was copied from, or what a user calls it.
    """

    value: Any
    origin: Parameter | str


class SharedTensors:
    """Notices whether tensors have been written to since it looked.

    Args:
        shared: The tensors and arrays.
    """

    def __init__(self, shared: Sequence[Shared]) -> None:
        self._shared = list(shared)
        self._measured = [one for one in shared if one.value is one.origin and _has_norm(one.value)]
        self._versions, self._norms = self._versions_now(), self._norms_now()

    def look(self) -> None:
        """Takes things as they are now."""
        self._versions, self._norms = self._versions_now(), self._norms_now()

    def written(self) -> Parameter | str | None:
        """Returns the origin of one that has been written to, or None."""
        for one, before, now in zip(self._shared, self._versions, self._versions_now(), strict=True):
            if before != now:
                return one.origin
        for one, norm, norm_now in zip(self._measured, self._norms, self._norms_now(), strict=True):
            if norm != norm_now and not math.isnan(norm):
                return one.origin
        return None

    def _versions_now(self) -> tuple[int, ...]:
        return tuple([_version(one.value) for one in self._shared])

    @torch.no_grad()
    def _norms_now(self) -> tuple[float, ...]:
        if not self._measured:
            return ()
        return tuple([norm.item() for norm in torch._foreach_norm([one.value for one in self._measured])])


def _version(value: Any) -> int:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    return hash(value.tobytes()) if value.nbytes <= _MAX_ARRAY_BYTES else 0


def _has_norm(value: Any) -> bool:
    is_plain = type(value) in (Tensor, Parameter) and value.layout is torch.strided and value.device.type == "cpu"
    return is_plain and value.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def can_be_written(value: Any) -> bool:
    """Whether it is a tensor or an array."""
    return isinstance(value, (Tensor, np.ndarray))

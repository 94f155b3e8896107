"""What replicas share and a step must not write to: parameters, and tensors and arrays that attributes hold.

Where each replica writes to them, the change happens once per replica, or is lost with a copy on another GPU.
torch counts most writes to a tensor. Those through ``parameter.data``, which is how many write the update of a target
network, it does not: on the CPU, where replicas share the parameters themselves, norms tell.

What it does not promise: to notice writes through ``.data`` to parameters on GPUs, where looking would have to wait for
the device, or to tensors that are no parameters; a change that leaves a parameter's norm as it is; or one to an array
of more than 64 KiB.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

_MAX_ARRAY_BYTES = 1 << 16
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class SharedTensors:
    """Notices whether tensors have been written to since it looked.

    Args:
        values: The tensors and arrays.
        origins: For each, the parameter that it is or was copied from, or what a user calls it.
    """

    def __init__(self, values: Sequence[Any], origins: Sequence[Parameter | str]) -> None:
        self._values, self._origins = values, origins
        self._measured: list[Tensor] = [
            value for value, origin in zip(values, origins, strict=True) if _has_norm(value, origin)
        ]
        self.look()

    def look(self) -> None:
        """Takes things as they are now."""
        self._versions, self._norms = self._versions_now(), self._norms_now()

    def written(self) -> Parameter | str | None:
        """Returns the origin of one that has been written to, or None."""
        versions = self._versions_now()
        if versions != self._versions:
            changes = [before != now for before, now in zip(self._versions, versions, strict=True)]
            return self._origins[changes.index(True)]
        for parameter, before, now in zip(self._measured, self._norms, self._norms_now(), strict=True):
            if before != now and not math.isnan(before):
                return cast(Parameter, parameter)
        return None

    def _versions_now(self) -> list[int]:
        return [_version(value) for value in self._values]

    @torch.no_grad()
    def _norms_now(self) -> list[float]:
        return [norm.item() for norm in torch._foreach_norm(self._measured)] if self._measured else []


def _version(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return hash(value.tobytes()) if value.nbytes <= _MAX_ARRAY_BYTES else 0
    try:
        return value._version  # type: ignore[no-any-return]
    except RuntimeError:  # a tensor that was made in inference mode has none
        return 0


def _has_norm(value: Any, origin: Any) -> bool:
    return value is origin and type(value) is Parameter and value.is_cpu and value.dtype in _FLOATS


def can_be_written(value: Any) -> bool:
    """Whether it is a tensor or an array."""
    return isinstance(value, (Tensor, np.ndarray))

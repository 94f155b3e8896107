"""Transfer of torch's thread-local state: gradient mode, inference mode, autocast, current device, and stream."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch


class ThreadState:
    """Snapshot of the state of the thread that creates it.

    Args:
        device: Device whose state is recorded, in addition to the state of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_gradients = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._casts = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", device.type})
            if torch.is_autocast_enabled(kind)
        ]
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def applied(self) -> Generator[None, None, None]:
        """Applies the state to the current thread inside the context."""
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(self._stream))
            if self._is_inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._has_gradients))
            for kind, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._caches_casts))
            yield

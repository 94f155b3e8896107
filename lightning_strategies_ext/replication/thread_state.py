"""What torch keeps per thread, handed on: gradient mode, inference mode, autocast, the current device and stream."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch


class ThreadState:
    """The state of the thread that constructs it.

    Args:
        device: The device whose state counts, besides the CPU's.
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
        """Gives the thread that enters it the same state."""
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

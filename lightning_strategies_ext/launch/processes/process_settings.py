"""State that workers receive from the main process: directory, environment variables, random states, torch settings."""

import os
import random
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass
class ProcessSettings:
    """Global state of the main process when it sends a task, for the workers that run the task."""

    directory: str
    environment: dict[str, str]
    rng: "RngState"
    num_threads: int
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    is_deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    only_warns: bool = field(default_factory=torch.is_deterministic_algorithms_warn_only_enabled)
    cudnn_benchmark: bool = field(default_factory=lambda: bool(torch.backends.cudnn.benchmark))
    cudnn_deterministic: bool = field(default_factory=lambda: bool(torch.backends.cudnn.deterministic))
    matmul_precision: str = field(default_factory=torch.get_float32_matmul_precision)

    def apply(self) -> None:
        """Applies the settings to this process."""
        self.enter_directory()
        self.set_environment()
        torch.set_num_threads(self.num_threads)
        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.set_float32_matmul_precision(self.matmul_precision)
        self.rng.apply()

    def enter_directory(self) -> None:
        """Changes to the working directory of the main process."""
        os.chdir(self.directory)

    def set_environment(self) -> None:
        """Replaces all environment variables by those of the main process."""
        for name in set(os.environ) - set(self.environment):
            del os.environ[name]
        os.environ.update(self.environment)


@dataclass
class RngState:
    """States of the random number generators of Python, NumPy, and torch, and of this rank's GPU if CUDA is in use."""

    python: Any
    numpy: Any
    torch_cpu: bytes
    torch_cuda: bytes | None

    @classmethod
    def now(cls) -> "RngState":
        """Returns the current states of this process."""
        cuda = bytes(torch.cuda.get_rng_state().numpy()) if torch.cuda.is_initialized() else None
        kind, keys, *rest = np.random.get_state(legacy=True)
        numpy = (kind, bytes(keys), *rest)  # type: ignore[arg-type]
        return cls(random.getstate(), numpy, bytes(torch.get_rng_state().numpy()), cuda)

    def is_same(self, other: "RngState") -> bool:
        """Whether the states of the CPU generators are equal."""
        return (self.python, self.numpy, self.torch_cpu) == (other.python, other.numpy, other.torch_cpu)

    def apply(self) -> None:
        """Sets the generators of this process to these states."""
        random.setstate(self.python)
        kind, keys, *rest = self.numpy
        np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch_cpu), dtype=torch.uint8))
        if self.torch_cuda is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(self.torch_cuda), dtype=torch.uint8))


def is_interactive() -> bool:
    """Whether this process is a notebook or has a prompt, so that no other process can import its definitions."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)

"""Support for exchanges that overwrite gradients while autograd still computes other gradients."""

from typing import Final

import torch
from torch import Tensor

#: Number of references to the memory of a gradient that autograd has just computed, if no other tensor refers to it:
#: the gradient of the parameter, the object that counts references, and, in a hook of the node, the hook's argument.
NUM_HOLDERS: Final = 2
NUM_HOLDERS_IN_HOOK_OF_NODE: Final = 3


def gradient_of(parameter: Tensor) -> Tensor:
    """Returns the gradient of a parameter; if there is none, sets it to zeros first."""
    gradient = parameter.grad
    if gradient is None:
        gradient = parameter.grad = torch.zeros_like(parameter)
    return gradient


def unshare_gradient(parameter: Tensor, num_holders: int) -> Tensor:
    """Returns the gradient of a parameter; if another tensor shares its memory, copies it first.

    In autograd, a gradient may share the memory of another tensor. After ``hidden + parameter.view(...)``, this is the
    gradient of ``hidden``, from which autograd computes the gradients of earlier layers next. An exchange that
    overwrites the gradient meanwhile would silently corrupt these (tests/torch_distributed/test_direct_exchange.py).

    Args:
        parameter: Parameter whose dense gradient was just computed; a missing gradient is replaced with zeros.
        num_holders: Number of references to the memory if no other tensor shares it.
    """
    gradient = gradient_of(parameter)
    # A private name of torch (2.5 to 2.13).
    if torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > num_holders:
        gradient = parameter.grad = gradient.detach().clone()
    return gradient

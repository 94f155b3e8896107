"""Gradients that an exchange overwrites while autograd still computes others."""

from typing import Final

import torch
from torch import Tensor

#: What holds the memory of a gradient that autograd has just computed, if no other tensor refers to it: the gradient of
#: the parameter, the object with which holders are counted, and, in a hook of the node, what the hook is called with.
NUM_HOLDERS: Final = 2
NUM_HOLDERS_IN_HOOK_OF_NODE: Final = 3


def gradient_of(parameter: Tensor) -> Tensor:
    """Returns the gradient of a parameter; zeros, which become its gradient, if there is none."""
    gradient = parameter.grad
    if gradient is None:
        gradient = parameter.grad = torch.zeros_like(parameter)
    return gradient


def unshare_gradient(parameter: Tensor, num_holders: int) -> Tensor:
    """Returns the gradient of a parameter in memory to which no other tensor refers; copies it if one does.

    Autograd lets a gradient refer to the memory of another tensor: after ``hidden + parameter.view(...)`` to that of
    the gradient of ``hidden``, from which it computes the gradients of earlier layers next. An exchange that overwrites
    the gradient meanwhile would make those wrong, without an error (tests/torch_distributed/test_direct_exchange.py).

    Args:
        parameter: Whose dense gradient was just computed, or is missing, which counts as zeros.
        num_holders: How many references to the memory there are if no other tensor has one.
    """
    gradient = gradient_of(parameter)
    # A private name of torch's (2.5 to 2.13).
    if torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > num_holders:
        gradient = parameter.grad = gradient.detach().clone()
    return gradient

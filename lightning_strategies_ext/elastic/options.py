"""What a user can say of elastic training, whatever engine carries it."""

from typing import Any

#: Optimizer steps between two commits, by default.
COMMIT_EVERY_N_STEPS = 100


def check_commit_interval(commit_every_n_steps: Any) -> int:
    """Optimizer steps between two commits.

    Args:
        commit_every_n_steps: As the user said, or None.

    Raises:
        TypeError: If it is no whole number.
        ValueError: If it is less than one.
    """
    if commit_every_n_steps is None:
        return COMMIT_EVERY_N_STEPS
    if not isinstance(commit_every_n_steps, int):
        raise TypeError(f"`commit_every_n_steps` must be a whole number, got {commit_every_n_steps!r}.")
    if commit_every_n_steps < 1:
        raise ValueError(f"`commit_every_n_steps={commit_every_n_steps}` must be 1 or more.")
    return commit_every_n_steps

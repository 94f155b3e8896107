"""What a user can say of elastic training, checked before anything starts."""

from typing import Any

from lightning_strategies_ext.horovod.exchange import ExchangeOptions
from lightning_strategies_ext.registry import UnavailableHereError

#: Optimizer steps between two commits, by default.
COMMIT_EVERY_N_STEPS = 100


def commit_interval(elastic: Any, commit_every_n_steps: Any, options: ExchangeOptions) -> int | None:
    """Optimizer steps between two commits; None where the ranks stay the same.

    Args:
        elastic: Whether ranks may come and go.
        commit_every_n_steps: As the user said, or None.
        options: How gradients are exchanged.

    Raises:
        UnavailableHereError: If no elastic driver has started this process.
        TypeError: If a value is of the wrong kind.
        ValueError: If a value or a combination cannot work.
    """
    if not isinstance(elastic, bool):
        raise TypeError(f"`elastic` must be True or False, got {elastic!r}.")
    if commit_every_n_steps is not None and not isinstance(commit_every_n_steps, int):
        raise TypeError(f"`commit_every_n_steps` must be a whole number, got {commit_every_n_steps!r}.")
    if not elastic:
        if commit_every_n_steps is not None:
            raise ValueError(
                f"`commit_every_n_steps={commit_every_n_steps}` is for `elastic=True`. Set that, or leave it out."
            )
        return None
    interval = COMMIT_EVERY_N_STEPS if commit_every_n_steps is None else commit_every_n_steps
    if interval < 1:
        raise ValueError(f"`commit_every_n_steps={interval}` must be 1 or more.")
    if options.op == "adasum":
        raise ValueError("`elastic=True` goes over gloo, and `op='adasum'` needs MPI or NCCL. Leave one of them out.")
    if options.process_set is not None:
        raise ValueError(
            f"`elastic=True` with `process_set={options.process_set}`: the ranks of a process set cannot be kept when"
            " ranks change. Leave one of them out."
        )
    if not driver.is_there():
        raise UnavailableHereError(
            "`elastic=True`: this process was not started for a changing number of ranks. Use `horovodrun -np 2"
            " --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python train.py`, or `elastic=False`."
        )
    return interval

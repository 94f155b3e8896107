"""Environment variables that make a process a rank. Processes that a rank starts inherit them.

A process that a rank starts, such as a script that ``subprocess`` runs, is not a rank. Each rank therefore records in
its environment that the variables belong to its process. A process that finds the record of another process with the
same variables has inherited them. A launcher that a rank starts sets other variables for its own ranks.
"""

import json
import os
import re

#: Variable with the process to which the rank variables belong, and the values that identify them.
OWNER = "LIGHTNING_STRATEGIES_EXT_RANK_PROCESS"
#: Variable with the name of the ranks' store, see :mod:`.host_store`, and their ``MASTER_PORT``; set if this package
#: has started all ranks on one host.
STORE = "LIGHTNING_STRATEGIES_EXT_STORE"
#: Variables that differ between two ranks, or between the ranks of two launches.
_IDENTITY = (
    "LOCAL_RANK",
    "RANK",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "SLURM_PROCID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "JSM_NAMESPACE_RANK",
    "HOROVOD_RANK",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_NAMESPACE",
    "PMI_RANK",
    "PMI_JOBID",
)
#: Names of the variables that launchers, Lightning, and this package set for each rank.
RANK_VARIABLES = re.compile(
    r"((LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|SLURM_(NTASKS|PROCID|LOCALID|NODEID)|JSM_NAMESPACE_\w+"
    r"|HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|GLOO_RENDEZVOUS_\w+|GLOO_IFACE|HOSTNAME|CONTROLLER|CPU_OPERATIONS|ELASTIC)"
    r"|OMPI_COMM_WORLD_\w+|OMPI_UNIVERSE_SIZE|OMPI_MCA_(ess|orte|pmix)_\w+|PRTE_\w+|PMIX_\w+|PMI_\w+|MPI_LOCAL\w+"
    r"|LIGHTNING_STRATEGIES_EXT_(HOROVOD_PARENT_PID|STORE))"
)


def record_owner() -> None:
    """Records that the rank variables belong to the current process; called by a rank."""
    if (record := os.environ.get(OWNER)) and json.loads(record)[0] != os.getpid():
        os.environ.pop(STORE, None)  # another launcher has started this rank from a rank, which uses that store
    os.environ[OWNER] = json.dumps([os.getpid(), _identity()])


def drop_inherited() -> bool:
    """Removes rank variables that this process has inherited from a rank, directly or through other processes.

    Returns:
        Whether there were inherited variables.
    """
    if OWNER not in os.environ:
        return False
    pid, identity = json.loads(os.environ[OWNER])
    if pid == os.getpid():
        return False
    os.environ.pop(STORE, None)  # also where another launcher has started this process
    is_inherited = bool(identity == _identity())
    for name in _names() if is_inherited else []:
        del os.environ[name]
    del os.environ[OWNER]
    return is_inherited


def store_variable(name: str, port: int | str) -> str:
    """Returns the value of :data:`STORE` for the ranks of one launch, which share ``MASTER_PORT``."""
    return f"{name} {port}"


def store_name() -> str | None:
    """Returns the name of the ranks' store; None if this package has not started the ranks, or not on one host.

    If a rank has started the launcher of this rank, this rank has inherited the variable, but has another
    ``MASTER_PORT``.
    """
    name, _, port = os.environ.get(STORE, "").partition(" ")
    return name if name and port == os.environ.get("MASTER_PORT") else None


def environment_for_ranks() -> dict[str, str]:
    """Returns the environment for ranks that this process starts."""
    return {name: value for name, value in os.environ.items() if name != OWNER}


def inherited_text() -> str:
    """Returns the part of an error message about rank variables that this process may have inherited."""
    listed = ", ".join(f"{name}={os.environ[name]}" for name in _names())
    return (
        f"This process takes its rank from the environment variables {listed}. If it was started by a rank and is not"
        " a rank itself, remove these variables from the environment that the rank passes to it."
    )


def _names() -> list[str]:
    return sorted(name for name in os.environ if RANK_VARIABLES.fullmatch(name))


def _identity() -> dict[str, str]:
    return {name: os.environ[name] for name in _IDENTITY if name in os.environ}

"""Several ranks on one GPU. NCCL refuses two ranks of one host on a GPU, so each rank acts as a host.

pass_for_own_host()
make_trainer("ddp_ext", accelerator="gpu", devices=1, num_nodes=2)
"""

import os


def pass_for_own_host() -> None:
    """Makes NCCL treat this process as a separate host. Call it before the rank joins a group."""
    os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")

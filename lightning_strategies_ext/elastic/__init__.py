"""Elastic training: ranks may fail, leave, and join during ``fit``.

Each rank holds a commit of its training state in memory. When the world changes, each process gets its rank in the next
world: from ``horovodrun --host-discovery-script ...``, from the main process that manages the workers, or from
torchrun. All ranks restore the newest commit and shard the remaining samples again. torchrun restarts the processes of
all ranks, so their commits outlive them (:mod:`.memfd_commit`); otherwise only lost ranks are replaced. Read
:mod:`.fit` first.
"""

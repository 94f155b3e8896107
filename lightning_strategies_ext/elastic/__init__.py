"""Elastic training: ranks may fail, leave, and join during ``fit``.

Each rank holds a commit of its training state in memory. When the world changes, each process gets its rank in the next
world: from ``horovodrun --host-discovery-script ...``, from the main process that manages the workers, or from
torchrun. All ranks restore the newest commit and shard the remaining samples again. Only torchrun restarts processes;
their commits outlive them (:mod:`.memfd_commit`). Read :mod:`.fit` first.
"""

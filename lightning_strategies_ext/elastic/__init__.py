"""Elastic training over Horovod: ranks may fail, leave, and join during ``fit``.

``horovodrun --host-discovery-script ...`` starts ranks when hosts join, and assigns each rank its number in the next
world. The ranks hold a commit of their state in memory. When the world changes, all ranks restore the newest commit
without a restart of their processes, and shard the remaining samples again. Read :mod:`.fit` first.
"""

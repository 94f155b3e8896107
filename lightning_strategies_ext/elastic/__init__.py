"""Elastic training over Horovod: ranks may die, leave and join while ``fit`` runs.

``horovodrun --host-discovery-script ...`` starts ranks as hosts come and gives each rank its place in the next world.
The ranks keep a commit of their state in memory. When the world changes, all go back to the newest commit, without a
new process, and share out the samples that are left. Read :mod:`.fit` first.
"""

"""Workers on a Ray cluster: placement, messages, tasks, signals, and output. Does not depend on Lightning.

The pool, the worker's side of the protocol, and the tasks are those of :mod:`.launch.processes` and
:mod:`.launch.tasks`. Ray starts and ends one process per worker, an actor. A message is a call of a method of the
actor, and tensors travel through Ray's object store. A :class:`.WorkerLink` carries the messages that cannot wait until
that method returns. If the main process is outside the cluster (Ray Client), a :class:`.LinkRelayActor` inside the
cluster relays the links.

Not supported: an elastic task whose main process is outside the cluster.
"""

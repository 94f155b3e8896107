"""Workers on a Ray cluster: placement, messages, tasks, signals, and output. This package does not know Lightning.

The pool, the worker's part of the protocol, and the tasks are those of ``processes`` and ``tasks`` beside this package.
Ray starts one process for each worker, an actor, and ends it. A message is a call of a method of the actor, and tensors
travel through Ray's object store. A :class:`.WorkerLink` carries what cannot wait until that method returns. Where the
main process is outside the cluster (Ray Client), a :class:`.LinkRelayActor` inside relays the links.

Not supported: an elastic task whose main process is outside the cluster.
"""

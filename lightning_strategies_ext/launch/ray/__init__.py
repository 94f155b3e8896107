"""Workers on a Ray cluster: who places them, what carries messages, jobs, signals and output. It knows no Lightning.

The pool, the worker's part of the protocol and the stage are those of ``processes`` and ``stage`` beside this. Ray
starts a process for each worker, an actor, and ends it; a message is a call of a method of the actor, and tensors go
through Ray's object store. A :class:`.Line` beside it carries what cannot wait until the actor's method returns. Where
the main process is outside of the cluster (Ray Client), a :class:`.Relay` inside takes its part.

What it does not promise: that a job whose ranks may change runs with a main process outside of the cluster.
"""

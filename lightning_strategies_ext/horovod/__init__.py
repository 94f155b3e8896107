"""Engine Horovod of `horovod_ext`: startup and shutdown, collectives, and gradient exchange."""

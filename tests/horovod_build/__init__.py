"""The command that builds Horovod."""

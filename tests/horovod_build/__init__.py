"""Tests of the command that builds Horovod."""

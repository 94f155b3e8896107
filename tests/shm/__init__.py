"""Tests of the process group over shared memory."""

"""The process group over shared memory."""

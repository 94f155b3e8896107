"""Helpers of the operating system: processes and interpreters, sockets, memory, files of the user."""

"""Helpers of the operating system: processes, sockets, memory, files of the user."""

"""Worker processes: their start, the tasks that they run, and their exit. Independent of Lightning."""

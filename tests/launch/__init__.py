"""Workers, and what travels between them and the main process."""

"""Worker processes: how they start, what runs in them, how they end. It knows no Lightning."""

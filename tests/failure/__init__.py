"""SIGTERM, failing ranks, ranks that have left."""

"""Failure detection: rank statuses, failure monitors, stop agreements, stage exits, and failure reports."""

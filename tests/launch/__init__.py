"""Tests of launchers, workers, and the transfer of objects between workers and the main process."""

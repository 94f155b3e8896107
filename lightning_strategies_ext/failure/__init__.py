"""What happens when a rank is asked to stop (termination) or fails (reconciliation)."""

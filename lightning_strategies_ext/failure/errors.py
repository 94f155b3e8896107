"""What is raised where ranks do not get on together."""


class UnevenInputsError(RuntimeError):
    """Ranks have different numbers of batches, and nobody said what to do then."""

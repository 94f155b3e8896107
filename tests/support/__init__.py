"""What several test modules share; ``from tests.support.ranks import run_ranks`` is the most used."""

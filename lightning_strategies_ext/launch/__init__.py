"""How the processes of a run come to life."""

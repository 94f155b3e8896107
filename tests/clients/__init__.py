"""Programs that use other libraries based on Lightning; ``make clients`` runs the programs."""

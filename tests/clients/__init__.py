"""Programs that use libraries which build on Lightning; ``make clients`` runs them."""

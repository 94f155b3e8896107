"""Strategies for the Trainer; their methods are in the order in which the Trainer calls them."""

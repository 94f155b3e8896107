"""What ranks learn about their own exchanges."""

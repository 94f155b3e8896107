"""The strategies' faces for Lightning Fabric. They hold no logic of their own beyond Fabric's method names."""

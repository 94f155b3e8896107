"""Fabric's face."""

"""Tests of the strategies for Fabric."""

"""Placeholder, replaced by its package paragraph."""

"""Turns fields of ``hmt.optimizer`` into each parameter's rule and settings."""

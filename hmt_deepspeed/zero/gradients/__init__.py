"""Gradients between backward and the optimizer step: hooks, accumulation, reduction."""

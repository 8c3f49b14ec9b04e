"""Gradients from backward to the shard that takes them: hooks, accumulation, reduction."""

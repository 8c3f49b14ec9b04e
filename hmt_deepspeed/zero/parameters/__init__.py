"""State of each parameter: its rule, shards, weights, moments and gradient."""

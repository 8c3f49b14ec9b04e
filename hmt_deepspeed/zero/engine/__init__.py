"""The engine: selection by the config, refusals, training loop, metrics."""

"""Fields of ``hmt.optimizer`` as settings of each parameter, and which rule it gets."""

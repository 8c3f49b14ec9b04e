"""What a run does under stress: one module a case, `launch/stress.py` runs them."""

"""What a run does under stress: one module a case, listed in `cases`; `launch/stress.py` runs them."""

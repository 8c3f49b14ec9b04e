"""Figures of the papers beside the planner's own: `launch/bench.py papers`."""

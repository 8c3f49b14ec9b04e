"""Answers before a run: setups tried, tables, the DeepSpeed JSON, and prediction against measurement."""

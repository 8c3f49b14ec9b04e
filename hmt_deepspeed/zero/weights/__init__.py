"""Weights as an optimizer step sees them: shard, master, INT8 codes, stage 3's partitions."""

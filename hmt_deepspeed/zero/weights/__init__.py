"""Weights in an optimizer step: shard, master, INT8 codes, stage 3's partitions."""

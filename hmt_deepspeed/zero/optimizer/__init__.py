"""The ZeRO optimizer: one step over shards, and the interface that DeepSpeed expects."""

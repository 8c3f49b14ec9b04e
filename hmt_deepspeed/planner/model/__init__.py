"""The model as numbers: shapes, families, FLOPs, and the activations that backward needs."""

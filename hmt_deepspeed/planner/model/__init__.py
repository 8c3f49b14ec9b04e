"""The model as numbers: shapes, families, FLOPs, and what backward keeps of a layer."""

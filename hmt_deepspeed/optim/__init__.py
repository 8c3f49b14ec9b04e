"""Optimizer mathematics on tensors: no deepspeed, no torch.distributed, no I/O.

Shape legend used in this folder: a weight ``W`` is ``m x n`` (out x in), its gradient ``G`` likewise,
``r`` is the rank of a basis ``Q`` (``n x r``), ``k`` the number of probe columns, ``T`` tokens.
"""

"""Saves, encodes, swaps or recomputes activations between forward and backward, per component and layer.

Nothing here imports DeepSpeed, and importing touches no device.
"""

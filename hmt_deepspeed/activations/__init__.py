"""What becomes of activations between forward and backward, per component and layer.

Nothing here imports DeepSpeed, and importing touches no device.
"""

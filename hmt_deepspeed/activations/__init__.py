"""What becomes of activations between forward and backward, per component and layer.

``attribution`` says which module's outputs belong to which component; importing touches no device.
"""

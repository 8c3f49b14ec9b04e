"""What becomes of a model's activations between forward and backward, per component.

``codecs`` are the forms in which one tensor can be held; nothing here imports DeepSpeed.
"""

"""Moving bytes between GPU, host and SSD: the only room that owns streams, pinned buffers and files.

``transfer`` moves tensors between the device and pinned host memory; the stores (``host``, ``nvme``,
``tiered``) keep tensors under names and all have the same four verbs: put, prefetch, get, drop.
``alternate`` and ``slot_pipeline`` keep what is worked on where it lies: states on an SSD, step by step.
Nothing here imports DeepSpeed, and importing touches no device.
"""

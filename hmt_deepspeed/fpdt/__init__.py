"""Sequences that do not fit, chunk by chunk (FPDT): decoder layers of HF models whose every stage runs in
chunks of tokens, with keys and values on the host.

``install.install`` replaces the layers of a model; ``install.register_attention`` offers attention alone.
Nothing here imports DeepSpeed or owns a stream, and importing changes nothing.
"""

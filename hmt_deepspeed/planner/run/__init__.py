"""The run as numbers: optimizer states, ZeRO, offload and FPDT as bytes and FLOPs of one iteration."""

"""The activation backend and FPDT in an engine."""

"""Bases under ZeRO: where they wait, how they are found, cached and carried over."""

"""Bases of a gradient's row space: draws, range finders, ranks from spectra and under a budget."""

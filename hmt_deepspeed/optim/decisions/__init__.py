"""Decides when a matrix takes a new basis, at which rank, and with which matrices it shares it."""

"""Bases under ZeRO: storage, refresh, host cache, moments of previous bases."""

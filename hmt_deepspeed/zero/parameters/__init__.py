"""Everything of each parameter, built once."""

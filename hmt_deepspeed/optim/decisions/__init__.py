"""When a matrix takes a new basis, of which rank, and with whom it shares it."""

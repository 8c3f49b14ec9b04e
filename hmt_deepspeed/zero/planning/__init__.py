"""A run that measures itself, plans its activations and carries the plan out."""

"""Linear layers whose backward never forms the weight gradient, and what they change in a model."""

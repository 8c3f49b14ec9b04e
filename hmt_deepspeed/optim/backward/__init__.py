"""Linear layers whose backward never forms the weight gradient, and the patches that install them."""

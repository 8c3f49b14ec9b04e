"""Linear layers and experts whose backward never forms the weight gradient, and the patches that install them."""

"""Who holds which rows, and the collectives of a data-parallel group."""

"""The best plan by a mixed-integer linear program: cost of a plan, its program, the search."""

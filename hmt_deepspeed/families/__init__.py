"""Model families: one row each, which attribution, FPDT and the planner ask."""

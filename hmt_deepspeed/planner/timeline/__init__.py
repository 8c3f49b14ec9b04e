"""A plan played event by event, its picture, and the plan that wastes least."""

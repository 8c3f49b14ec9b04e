"""Pure planning: frozen inputs (model, machine, budget) to a frozen plan. No CUDA, no clock, no I/O."""

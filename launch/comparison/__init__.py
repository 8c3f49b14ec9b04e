"""The paper's experiment: optimizers side by side on one model, data, order and token count."""

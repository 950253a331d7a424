"""Model weights and the forward pass."""

"""Lab: encoded activations, 8-bit gradients, 8-bit optimizer state."""

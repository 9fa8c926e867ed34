"""AGoQ: activations stored in about 4 bits, gradients stored and summed through 8 bits."""

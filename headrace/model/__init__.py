"""The models: config and checkpoint formats, weights, and the forward pass."""

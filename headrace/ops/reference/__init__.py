"""Pure PyTorch implementations of every operator: the specification, clear rather than fast."""

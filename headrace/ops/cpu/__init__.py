"""CPU implementations besides the reference; `fixed_tile` is the batch-invariant set."""

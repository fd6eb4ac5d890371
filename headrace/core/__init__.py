"""Plain data and protocols shared by all layers; imports errors and nothing else, nor torch."""

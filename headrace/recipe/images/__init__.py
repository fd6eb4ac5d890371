"""Images of a prompt: their bytes, the size and pixels the model sees, the tokens they take."""

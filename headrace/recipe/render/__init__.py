"""Conversation -> prompt, one module per model version."""

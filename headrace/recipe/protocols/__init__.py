"""Requests of the public protocols -> conversation, one module per protocol."""

"""Items of an answer -> events and complete responses, one module per protocol."""

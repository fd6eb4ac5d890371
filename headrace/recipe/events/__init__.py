"""Engine output -> events and responses of the public protocols, one module per protocol."""

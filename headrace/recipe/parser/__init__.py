"""Engine output -> items of an answer: pieces, markers, and one state machine per level."""

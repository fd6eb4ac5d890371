"""What an answer must look like: requests -> checked rules -> a `GrammarSpec` for the engine."""

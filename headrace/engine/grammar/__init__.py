"""Structured output: grammars of answers, compiled, followed and applied as masks."""

"""Operators: one contract per operator, a reference that is the specification, faster columns.

`signatures.OPS` names the operators, `registry.resolve` freezes one `OpTable` per engine.
"""

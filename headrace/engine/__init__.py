"""The engine: requests of token ids in, tokens out, one step at a time.

Importing this package loads neither torch nor the model; `engine/README.md` says what each module
is for.
"""

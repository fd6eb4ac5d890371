"""Checks that users run: golden model cases (`headrace check model`)."""

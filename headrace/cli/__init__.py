"""The command line: one module per command, each with one function `command`.

`main` registers them lazily, so that `headrace --help` loads neither torch nor the server. A
command raises errors of `headrace.errors`; `main` alone turns them into text and exit codes.
"""

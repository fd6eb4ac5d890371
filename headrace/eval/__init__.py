"""Tasks with checkable answers in the real prompt format, and their evaluation.

`families` draws items from seeds: training uses seeds below FIRST_TEST_SEED, evaluation those from
there on. `run` answers them with an engine, `scores` makes the table. Used by `headrace eval` and
by `train/`.
"""

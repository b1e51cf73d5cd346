"""`audit` and `trace_nan` watch a program while it runs."""

"""One comparison: a function at a sample, its derivatives in six modes, and the results."""

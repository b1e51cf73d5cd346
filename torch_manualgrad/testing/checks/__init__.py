"""The checks, one file per kind, and the table of them."""

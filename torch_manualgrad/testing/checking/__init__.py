"""`check` and `composition`: run a function through every mode, check and transform."""

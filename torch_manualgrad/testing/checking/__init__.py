"""`check` and `composition`: a function through every mode, check and transform."""

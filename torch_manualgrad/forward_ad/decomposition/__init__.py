"""Forward mode for operators that lack it: decompositions, and what takes their place."""

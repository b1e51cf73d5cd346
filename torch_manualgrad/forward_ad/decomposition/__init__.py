"""Forward mode for operators that lack it: decompositions and their substitutes."""

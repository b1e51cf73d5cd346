"""Samples of the rules of operators on shapes."""

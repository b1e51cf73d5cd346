"""Finite differences, kinks and the arithmetic of both."""

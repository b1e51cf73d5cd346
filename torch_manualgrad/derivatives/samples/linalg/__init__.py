"""Samples of the rules of linear algebra."""

"""Samples of the rules of losses."""

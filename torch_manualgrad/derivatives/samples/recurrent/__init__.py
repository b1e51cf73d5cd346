"""Samples of the rules of recurrent layers."""

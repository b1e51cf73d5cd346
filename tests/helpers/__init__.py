"""Helpers of several test files, one module per subject."""

"""Calls of formulas and public functions with arguments that do not fit, and what becomes of the process and the errors."""

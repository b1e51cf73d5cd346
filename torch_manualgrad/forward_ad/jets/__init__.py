"""Truncated Taylor series: derivatives of high order along curves, and the Laplacians and products made of them."""

from . import rules, whole

__all__ = ["rules", "whole"]

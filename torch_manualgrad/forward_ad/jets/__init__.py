"""Truncated Taylor series: derivatives of high order along curves, and Laplacians and products made from them."""

from . import rules, whole

__all__ = ["rules", "whole"]

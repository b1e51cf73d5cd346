"""Samples of the rules of convolution, pooling and sampling."""

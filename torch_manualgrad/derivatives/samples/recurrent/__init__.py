"""Samples of the rules of recurrent layers."""

from . import cells, lstm_layer

__all__ = ["cells", "lstm_layer"]

"""Formulas and rules of recurrent layers. Importing a module registers them."""

from . import cells, lstm_layer, network

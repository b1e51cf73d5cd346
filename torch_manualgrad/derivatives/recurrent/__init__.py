"""Recurrent layers: importing a module enters its formulas and rules in the registries."""

from . import cells, lstm_layer, network

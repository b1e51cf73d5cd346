from . import normalization, normalization_layer


"""Random programs whose derivatives are compared with finite differences."""

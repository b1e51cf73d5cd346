"""The inputs of a check: calls as samples, their tensors, modules as functions, samples as source code."""

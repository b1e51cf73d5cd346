"""PyTorch's own operator database and its table of derivatives."""

"""blendjax: offline LLM inference on JAX, scheduled by resource demand."""

__version__ = "0.1.0"

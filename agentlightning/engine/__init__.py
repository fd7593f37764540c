"""The engine: embedded inference with continuous batching on torch. It knows token ids and weights
alone."""

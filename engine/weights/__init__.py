"""Weights of a version on their way from the writer of a Model to its readers.

Owns: weights as a block of rows, or as tensors that a block describes; hashes; the log-prob probe.
Does not own: when versions move (engine/coordinator), transports (engine/channels), modules
(kernels).
"""

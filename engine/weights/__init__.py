"""Weights of a version on their way from the writer of a Model to its readers: a block of rows, or
tensors, or one memory, that a block describes; hashes; the log-prob probe. Does not own: when
versions move (engine/coordinator), transports (engine/channels), modules (kernels).
"""

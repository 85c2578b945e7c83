"""Weight edges: how a version of a Model gets from its writer to its readers.

Owns: weights as a block of rows, or kept and described by one; their hashes; the log-prob probe.
Does not own: when a version moves (engine/coordinator), transports (engine/channels), modules
(kernels).
"""

"""Tensors between Workers and ranks: in worlds in which both ends are instructed (collectives), or
in memories that one Worker fills and others map.
"""

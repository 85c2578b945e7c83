"""Tensors between Workers and ranks, in worlds in which both ends are instructed: collectives."""

"""Measurements, with the command for each published number; nothing imports this package."""

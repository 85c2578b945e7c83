"""Measurements, with the command for each published number. Owns no part of the engine; nothing
imports it.
"""

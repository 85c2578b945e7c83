"""Measures a plan's Models on this machine, and fits what their passes take.

Enters: a plan. Leaves: a profile's file (engine/plan/cost/profile.py). Waits: for one measuring
process at a time.
"""

"""A plan's Steps in simulated time: the cost model, with the real coordinator and loop.

Enters: a plan, lengths of rows. Leaves: a Prediction, and what is said of it. Waits: nobody.
"""

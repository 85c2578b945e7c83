"""Which of several plans is best: pure functions of prices, for whoever compares plans.

Enters: prices of plans and of their parts. Leaves: loads of Workers, shares of a link. Nobody waits
for anybody. Owns: the comparison. Does not own: the prices (engine/plan/cost, step_price.py).
"""

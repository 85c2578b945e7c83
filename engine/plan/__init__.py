"""From a checked graph to a plan: what runs where, with what, and what that should cost.

Enters: a CheckedGraph or CheckedProgram, the options, the machines (clusters), a profile.
Leaves: a Plan, plain data that everybody below and above may read, and its text (explain/).
Waits: nobody. planner.py runs passes/ in their order, the last of which are checks/; cost/ has the
formulas, which know no plan. Nothing here runs, reads rows, or imports torch.
"""

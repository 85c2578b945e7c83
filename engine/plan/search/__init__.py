"""The search for layouts: which nodes share devices, how many these are, and how each is divided.

What enters: nodes with prices of their layouts (problem.py), priced by the cost model (layouts.py)
or by a test. What leaves: the best few placements, as wishes that the rule of placement carries out
(wishes.py), and why the others fell out.

    problem.py      what is searched: nodes, pools of devices, prices
    layouts.py      the layouts of a node, and what each costs on so many devices
    group_price.py  which layouts nodes that share devices have together
    step_time.py    how long a Step of a placement takes
    division.py     how many devices each group has
    groupings.py    which nodes share devices: all ways, and steps from one to the next
    choice.py       the search itself
    wishes.py       a placement as wishes
    searched_graph.py, device_pools.py  what is searched of a graph on a cluster
    bounds.py       a placement in words
    list_starts.py, grown_starts.py  placements to begin with
    equal_finish.py loads of unlike Workers that end together
"""

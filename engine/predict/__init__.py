"""Before there is a run: what a machine reaches (profile/), what plans will do (simulations.py).

Enters: graphs, options, machines, profiles, earlier runs. Leaves: seconds, utilisation, memory, the
better of several plans. Waits: nobody; a profile's processes run one after another. Begin with
simulations.py and profile/profiler.py.
"""

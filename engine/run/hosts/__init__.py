"""Workers on the hosts of a Ray cluster: a Supervisor on each, and a link to it.

Enters: a Plan with hosts. Leaves: the loop's Workers (hosts.py), whatever host each is on.
Waits: a link for the next messages of its host, until the lease is over. One file, ray.py, knows
Ray.
"""

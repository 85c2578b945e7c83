"""Environments of episodes, run: in processes of their own, in shared ones, or in the kernel's.

A pool (pool.py, in_process.py) answers what replies.py says. Its processes: a keeper, which is that
of rewards (scoring_keeper.py), a template and what is forked from it (template_process.py and
episode_process.py are this end, child/ is the other one). Does not own: what becomes of an episode.
"""

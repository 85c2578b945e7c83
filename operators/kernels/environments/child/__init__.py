"""The inside of environments' processes: a package that any Python from 3.9 on loads by its path.

Owns: what the template and the processes forked from it do, and the adapters to libraries of
environments. Does not own: the parent's end (pool.py and the files beside it). It imports the
standard library alone, itself by relative imports, and an adapter's library in that adapter.
"""

"""The processes of Workers on this host: started, spoken to, watched, ended.

Enters: a Plan. Leaves: a Supervisor (supervisor.py), which is the loop's Workers; or the one Worker
in this process (worker_assembly.py). Waits: its I/O thread (worker_io.py) for bytes, deaths and
silence.
"""

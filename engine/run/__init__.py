"""A plan is carried out: the loop, Workers, and the processes and hosts that they are on.

Enters: a Plan, a run folder, signals. Leaves: rows and weights from Worker to Worker, files that
engine/keep defines, events for whoever listens. Rooms: loop/ between coordinator and Workers;
worker/ runs kernels; launch/ and hosts/ start Workers; control/ is what is said between processes;
worker_process/ is the other end; simulated_workers/ stand in for all that in tests and estimates.
"""

"""Which pool an environment gets.

Owns: the choice. Does not own: the pools (pool.py, in_process.py, routing.py).
"""

from __future__ import annotations

import contextlib

from dataflow.kernel import KernelNode
from operators.environments import AnyEnvironment, Environment, EnvironmentsByColumn
from operators.kernels.environments.in_process import InProcessPool
from operators.kernels.environments.pool import ProcessPool
from operators.kernels.environments.replies import EnvironmentPool
from operators.kernels.environments.routing import RoutedPool


def open_pool(environment: AnyEnvironment, node: KernelNode) -> EnvironmentPool:
    """Open the pool of a node's environments: in this process where the run is `inproc`, else in
    processes of their own. Raises KernelError if one cannot be loaded.
    """
    if not isinstance(environment, EnvironmentsByColumn):
        return _open_one(environment, node)
    with contextlib.ExitStack() as undo:
        pools: dict[str, EnvironmentPool] = {}
        for name, kind in environment.kinds.items():
            pools[name] = _open_one(kind, node)
            undo.callback(pools[name].close)
        routed_pool = RoutedPool(environment, pools, name=node.name)
        undo.pop_all()
        return routed_pool


def _open_one(environment: Environment, node: KernelNode) -> ProcessPool | InProcessPool:
    if node.inproc:
        return InProcessPool(environment, name=node.name)
    return ProcessPool(
        environment,
        name=node.name,
        reset_timeout=float(node.params.get("reset_timeout", 60.0)),
        step_timeout=float(node.params.get("step_timeout", 60.0)),
    )

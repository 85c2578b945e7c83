"""The agents' demo with three seeds one after another, and a table of them.

python examples/demo_agent_seeds.py      (or: make demo-agent)
"""

from __future__ import annotations

from pathlib import Path

import demo_agent
import tyro
from rich.console import Console
from rich.table import Table


def main(seeds: tuple[int, ...] = (301, 302, 303), runs: Path = Path("runs")) -> None:
    """Run the demo with each seed.

    Args:
        seeds: of the runs.
        runs: folder that holds the run folders.
    """
    table = Table("seed", "before RL", "after RL", title="right numbers, sampled")
    for seed in seeds:
        result = demo_agent.main(seed=seed, name=f"demo-agent-{seed}", runs=runs)
        before, after = demo_agent.measure(result)
        table.add_row(str(seed), f"{before:.2f}", f"{after:.2f}")
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)

"""The rules of the check, one a file, in the order in which they look at a graph.

Owns: the lists, of rules and of warnings. Each rule is a function from a Context to faults, and
none relies on another's having found nothing: all are asked, and the user sees every fault at once,
by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dataflow.errors import Fault, GraphWarning
from dataflow.rules import (
    bases,
    clocks,
    columns,
    doubtful,
    groups,
    held_out,
    lineage,
    liveness,
    names,
    normalised,
    parameters,
    sampled,
    state,
    trained_at,
    unused,
    versions,
    vocabulary,
)
from dataflow.rules.context import Context

Rule = Callable[[Context], Iterator[Fault]]

RULES: tuple[Rule, ...] = (
    names.check,  # first: on one line, an ambiguous name is the likeliest cause of what follows
    parameters.check,  # numbers before what is derived from them: group sizes, lags, batches
    columns.check,  # a wrong wire before the rows that it carries
    lineage.check,  # the same rows before their groups
    groups.check,  # the rows of a prompt
    normalised.check,  # the last of the rules on data edges
    trained_at.check,  # what training compares with what those edges carry
    state.check,  # who writes and reads, before how old it may be
    versions.check,  # lags, before the loops that they keep alive
    sampled.check,  # whose version log-probs are, before at which temperature
    liveness.check,  # loops through States
    clocks.check,  # what moves each node
    held_out.check,  # training and evaluation apart, once it is known what feeds which
    bases.check,  # late: it reads the Models' files
    vocabulary.check,  # last: it compares them
)

WARNINGS: tuple[Callable[[Context], Iterator[GraphWarning]], ...] = (
    doubtful.large_batches,
    doubtful.greedy_groups,
    doubtful.updates_without_ratio,
    doubtful.references_of_the_policy,
    unused.lags,
    unused.intakes,
)
"""What looks wrong in a graph that can be run. Asked of a graph for which every rule holds; shown
by source line.
"""

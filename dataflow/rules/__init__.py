"""The rules of the check, one per file, in the order in which they look at a graph.

Owns: the lists of rules and of warnings. Each rule is a function from a Context to faults, and does
not rely on others having found nothing: all run, and the user sees every fault at once, by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dataflow.errors import Fault, GraphWarning
from dataflow.rules import (
    bases,
    clocks,
    columns,
    concats,
    critics,
    groups,
    held_out_data,
    hidden_columns,
    implausible_values,
    lineage,
    liveness,
    misspelt_columns,
    names,
    off_policy,
    parameters,
    sampling_temperatures,
    state,
    suspect_graphs,
    training_temperature,
    unused_settings,
    versions,
    vocabulary,
    whitening,
)
from dataflow.rules.context import Context

Rule = Callable[[Context], Iterator[Fault]]

RULES: tuple[Rule, ...] = (
    names.check,  # first: on one line, an ambiguous name is the likeliest cause of the rest
    parameters.check,  # numbers before what is derived from them: group sizes, lags, batches
    columns.check,  # a wrong wire before the rows that it carries
    lineage.check,  # the same rows before their groups
    concats.check,  # rows of several inputs, which lineage.py does not compare
    groups.check,  # the rows of a prompt
    whitening.check,  # the last of the rules on data edges
    training_temperature.check,  # what training compares with what those edges carry
    state.check,  # who writes and reads, before how old it may be
    versions.check,  # lags, before the loops that they keep alive
    sampling_temperatures.check,  # whose version log-probs have, before their temperature
    liveness.check,  # loops through States
    clocks.check,  # what drives each node
    held_out_data.check,  # training and evaluation apart, once it is known what feeds what
    bases.check,  # late: it reads the Models' files
    vocabulary.check,  # last: it compares them
)

WARNINGS: tuple[Callable[[Context], Iterator[GraphWarning]], ...] = (
    suspect_graphs.large_batches,
    suspect_graphs.greedy_groups,
    off_policy.losses_without_ratio,
    off_policy.ratios_with_other_policies,
    off_policy.greedy_rows,
    suspect_graphs.references_of_the_policy,
    hidden_columns.hidden_columns,
    held_out_data.other_weights,
    critics.frozen_critics,
    implausible_values.bounds_for_distances,
    implausible_values.tiny_temperatures,
    implausible_values.zero_weights,
    implausible_values.repeated_settings,
    misspelt_columns.optional_columns,
    unused_settings.lags,
    unused_settings.intakes,
    unused_settings.ports,
    unused_settings.token_rewards,
)
"""What looks wrong in a graph that can run. Run on graphs without faults; shown by source line."""

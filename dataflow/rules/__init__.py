"""The rules of the check, one per file, in the order in which they look at a graph.

Owns: the lists of rules and of warnings. Each rule is a function from a Context to faults, and does
not rely on others having found nothing: all run, and the user sees every fault at once, by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dataflow.errors import Fault, GraphWarning
from dataflow.rules import (
    adapters,
    critics,
    held_out_data,
    hidden_columns,
    implausible_values,
    misspelt_columns,
    off_policy,
    suspect_graphs,
    unused_settings,
)
from dataflow.rules.adapters import check_adapters
from dataflow.rules.bases import check_model_files
from dataflow.rules.clocks import check_clocks
from dataflow.rules.columns import check_wire_columns
from dataflow.rules.concats import check_concat_inputs
from dataflow.rules.context import Context
from dataflow.rules.groups import check_whole_groups
from dataflow.rules.held_out_data import check_held_out_data
from dataflow.rules.lineage import check_same_rows
from dataflow.rules.liveness import check_liveness
from dataflow.rules.names import check_unique_names
from dataflow.rules.parameters import check_parameter_values
from dataflow.rules.sampling_temperatures import check_one_sampler
from dataflow.rules.segments import check_segments
from dataflow.rules.state import check_states
from dataflow.rules.tables import check_tables
from dataflow.rules.training_temperature import check_training_temperature
from dataflow.rules.versions import check_read_versions
from dataflow.rules.vocabulary import check_vocabularies
from dataflow.rules.whitening import check_one_whitening

Rule = Callable[[Context], Iterator[Fault]]

RULES: tuple[Rule, ...] = (
    check_unique_names,  # first: on one line, an ambiguous name is the likeliest cause of the rest
    check_parameter_values,  # numbers before what is derived from them: group sizes, lags, batches
    check_wire_columns,  # a wrong wire before the rows that it carries
    check_same_rows,  # the same rows before their groups
    check_concat_inputs,  # rows of several inputs, which lineage.py does not compare
    check_whole_groups,  # the rows of a prompt
    check_segments,  # those of an episode
    check_one_whitening,  # the last of the rules on data edges
    check_training_temperature,  # what training compares with what those edges carry
    check_states,  # who writes and reads, before how old it may be
    check_tables,  # the same of Tables, and of their rows
    check_read_versions,  # lags, before the loops that they keep alive
    check_one_sampler,  # whose version log-probs have, before their temperature
    check_liveness,  # loops through States
    check_clocks,  # what drives each node
    check_held_out_data,  # training and evaluation apart, once it is known what feeds what
    check_model_files,  # late: it reads the Models' files
    check_adapters,  # then the weights in them
    check_vocabularies,  # last: it compares them
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
    implausible_values.followers_that_stand_still,
    adapters.low_rates,
    adapters.narrow_merges,
    misspelt_columns.optional_columns,
    unused_settings.unused_lags,
    unused_settings.held_back_lags,
    unused_settings.unused_intakes,
    unused_settings.unused_ports,
    unused_settings.unused_token_rewards,
)
"""What looks wrong in a graph that can run. Run on graphs without faults; shown by source line."""

"""Off policy: losses that are right only for rows of the trained Model, on rows that it did not
write. Warnings.

Owns: who wrote the rows of each term of a loss, and how far from the trained Model that is, also in
words. Does not own: lags that are stated (versions.py), temperatures (training_temperature.py),
groups of equal answers (suspect_graphs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from dataflow.errors import GraphWarning
from dataflow.loss_terms import LossTerm
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.regions import moved_by
from dataflow.rows import writers
from dataflow.rules.context import Context, describe_count, line_of, loss_terms, node_models
from dataflow.rules.suspect_graphs import greedy_by
from dataflow.rules.versions import bounds, row_lags
from dataflow.samplers import BySample


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainedTerm:
    """A term of a train node's loss, and who wrote its rows. lag: how many versions old the trained
    Model's own rows may be. samples: as Samplers.of tells.
    """

    node: Node
    term: LossTerm
    lag: int
    rows: Port
    samples: BySample

    @property
    def model(self) -> Model:
        """The trained one."""
        return _model_of(self.node)

    @property
    def generations(self) -> list[Node]:
        """All that wrote tokens of these rows, each once."""
        return list(dict.fromkeys(chain.from_iterable(self.samples)))

    @property
    def strangers(self) -> list[Node]:
        """Generations of other Models that wrote whole rows. Where the trained Model wrote some
        tokens of a row, those of others are its surroundings, such as a simulated user.
        """
        foreign = [makers for makers in self.samples if not any(map(self.is_own, makers))]
        return list(dict.fromkeys(chain.from_iterable(foreign)))

    @property
    def unsampled_node(self) -> str:
        """The node with rows that no generation wrote; empty if there are none."""
        if all(self.samples):
            return ""
        nodes = [node for node in writers(self.rows) if not node.operator.traits.generates]
        return nodes[0].name if nodes else self.rows.label

    def is_own(self, maker: Node) -> bool:
        """Whether a generation computes with the trained Model, or with one that copies it."""
        return self.model.name in {model.name for model in _with_leaders(maker)}

    def warning(self, rule: str, problem: str, fix: str) -> GraphWarning:
        """A warning at the user's line of the loss."""
        return GraphWarning(
            rule=rule,
            where=self.term.function.name,
            problem=problem,
            fix=fix,
            origin=self.term.origin or self.node.origin,
        )


def losses_without_ratio(context: Context) -> Iterator[GraphWarning]:
    """A loss for rows made by the weights that are trained, on rows made by others."""
    for trained in _trained_terms(context):
        if not trained.term.function.on_policy:
            continue
        is_corrected = trained.term.is_corrected
        reasons = list(_why_several_updates(trained.node))
        if not is_corrected:
            reasons += _why_older(trained)
            reasons += _why_of_others(context, trained)
        if not reasons:
            continue
        problem = (
            "it has no ratio, so its gradient is biased on rows of other weights than those that"
            f" are trained; {', and '.join(reasons)}"
        )
        fix = "clipped_policy_loss(advantage), or one update a Step on rows of lag 0"
        if not is_corrected and (trained.strangers or trained.unsampled_node):
            rows = f"rows of generate({trained.model.name}, ...)"
            fix = f"{rows}, or supervised_loss() to imitate these"
        yield trained.warning("no_ratio", problem, fix)


def ratios_with_other_policies(context: Context) -> Iterator[GraphWarning]:
    """A loss with a ratio, on rows of a Model that does not come along as the trained one moves."""
    for trained in _trained_terms(context):
        strangers = trained.strangers
        if not trained.term.function.recorded or trained.term.is_corrected or not strangers:
            continue
        name = trained.model.name
        wrote = _describe_maker(context, trained, strangers[0])
        fix = f"rows of generate({name}, ...), or of a Model that follows {name!r}"
        if f"{trained.term.label}.old" in trained.node.inputs:
            problem = (
                f"{wrote}; its ratio starts from {name!r} itself (old=), so nothing weighs the"
                f" rows by how likely {name!r} is to write them, and its gradient is biased"
            )
            fix += ", or correction=importance()"
        else:
            problem = (
                f"{wrote}; its ratio grows as {name!r} learns, until the bounds of the loss"
                " hold every token and nothing is learnt (policy/clip_fraction)"
            )
        yield trained.warning("other_policy", problem, fix)


def greedy_rows(context: Context) -> Iterator[GraphWarning]:
    """A policy is trained on its likeliest answers: the gradient assumes samples. Of several equal
    answers to a prompt, greedy_groups (suspect_graphs.py) tells.
    """
    for trained in _trained_terms(context):
        function = trained.term.function
        is_of_policy = function.on_policy or function.recorded or function.correction
        makers = trained.generations
        greedy = [maker for maker in makers if greedy_by(maker) and maker.params.get("n") == 1]
        if is_of_policy and greedy:
            maker, setting = greedy[0], greedy_by(greedy[0])
            problem = (
                f"its rows are the greedy answers of {maker.name!r}"
                f" ({line_of(maker, trained.node.origin)}, {setting}): they are no sample of what"
                " the policy writes, and the gradient is biased"
            )
            sampling = "temperature=1.0" if setting != "top_k=1" else "top_k=0"
            yield trained.warning("greedy_rows", problem, f"{sampling} in {maker.name!r}")


def policies(context: Context) -> dict[str, str]:
    """For each train node, in words: whose rows it trains, and how old they may be."""
    terms_by_node: dict[str, list[_TrainedTerm]] = {}
    for trained in _trained_terms(context):
        terms_by_node.setdefault(trained.node.name, []).append(trained)
    return {
        name: _describe_policy(terms_by_node.get(name, []), lag)
        for name, lag in bounds(context).items()
    }


def _describe_policy(terms: list[_TrainedTerm], lag: int) -> str:
    """Of the terms of one train node. lag: how many versions old its rows may be."""
    own_rows, age = "on policy", ""
    if lag:
        age = f"at most {describe_count(lag, 'version')} old"
        own_rows = f"rows {age}"
    phrases: dict[str, None] = {}
    for trained in terms:
        phrases |= dict.fromkeys(_list_foreign_rows(trained))
    foreign_rows = " and ".join(phrases)
    if not foreign_rows:
        return own_rows
    if any(map(_has_own_rows, terms)):
        return f"{own_rows}, but for {foreign_rows}"
    return f"{foreign_rows}, {age}" if age else foreign_rows


def _list_foreign_rows(trained: _TrainedTerm) -> Iterator[str]:
    """Rows that no version of the trained Model has sampled. A Model with another head writes none:
    its rows are those of a policy, which may be greedy.
    """
    writes = trained.model.head == "lm"
    if writes:
        for maker in trained.strangers:
            yield f"rows that {maker.name!r} writes with {_model_of(maker).name!r}"
    for maker in trained.generations:
        is_own = trained.is_own(maker)
        if is_own and _is_average(maker):
            yield f"rows that {maker.name!r} writes with {_model_of(maker).name!r}"
        elif greedy_by(maker) and (is_own or not writes):
            yield f"greedy answers of {maker.name!r}"
    if writes and trained.unsampled_node:
        yield f"rows of {trained.unsampled_node!r}"


def _has_own_rows(trained: _TrainedTerm) -> bool:
    """Whether a version of the trained Model sampled some; of one that writes none, a policy."""
    writes = trained.model.head == "lm"
    own_makers = [maker for maker in trained.generations if trained.is_own(maker) or not writes]
    return any(not _is_average(maker) and not greedy_by(maker) for maker in own_makers)


def _is_average(maker: Node) -> bool:
    """Whether a generation computes with a mean of several versions, which is none of them."""
    return any(model.rate != 1.0 for model in _with_leaders(maker) if model.follows is not None)


def _trained_terms(context: Context) -> Iterator[_TrainedTerm]:
    """Every term of a loss whose weight is not 0."""
    lags = row_lags(context)
    for node in context.graph.nodes:
        for term in loss_terms(node):
            rows = node.inputs.get(term.on)
            if rows is not None and term.weight != 0:
                lag, samples = lags[node.name, term.on], context.samplers.of(rows)
                yield _TrainedTerm(node=node, term=term, lag=lag, rows=rows, samples=samples)


def _why_several_updates(node: Node) -> Iterator[str]:
    """All updates of a Step but the first are on rows of older weights."""
    epochs, parts = node.params["epochs"], node.params["minibatches"]
    if epochs * parts > 1:
        updates = f"{node.name} makes {epochs * parts} updates a Step"
        yield f"{updates} (epochs={epochs}, minibatches={parts})"


def _why_older(trained: _TrainedTerm) -> Iterator[str]:
    """Why rows are of an older version of the trained Model."""
    copies: list[Model] = []
    for maker in trained.generations:
        if trained.is_own(maker):
            copies += [model for model in _with_leaders(maker) if model.follows is not None]
    if trained.lag > 0:
        cause = ""
        slow_copies = [model for model in copies if model.every > 1]
        if slow_copies:  # one of them says why
            cause = f": {slow_copies[0].name!r} moves every {slow_copies[0].every} Steps"
        yield f"rows may be {describe_count(trained.lag, 'version')} old{cause}"
    for model in copies:
        if model.rate != 1.0:
            yield f"rows are written with {model.name!r}, which follows at rate={model.rate:g}"


def _why_of_others(context: Context, trained: _TrainedTerm) -> Iterator[str]:
    """Why rows are of no version of the trained Model."""
    for maker in trained.strangers:
        yield _describe_maker(context, trained, maker)
    if trained.unsampled_node:
        yield f"no Model wrote the rows of {trained.unsampled_node!r}"


def _describe_maker(context: Context, trained: _TrainedTerm, maker: Node) -> str:
    model = _model_of(maker)
    line = line_of(maker, trained.node.origin)
    which = "which nothing trains"
    if model.name in context.trained:
        which = f"another Model than {trained.model.name!r}"
    return f"its rows are written by {maker.name!r} ({line}) with {model.name!r}, {which}"


def _with_leaders(maker: Node) -> list[Model]:
    """The Model of a generation, and those from which it copies."""
    model = _model_of(maker)
    return [model, *moved_by(model)]


def _model_of(node: Node) -> Model:
    return node_models(node)[0]

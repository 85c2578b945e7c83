"""Off policy: losses that are right only for rows of the trained Model, on rows that it did not
write. Warnings.

Owns: who wrote the rows of each term of a loss, and how far from the trained Model that is, also in
words. Does not own: lags that are stated (versions.py), temperatures (training_temperature.py),
groups of equal answers (suspect_graphs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dataflow.errors import GraphWarning
from dataflow.loss import Loss, LossTerm
from dataflow.model import Model
from dataflow.node import Node, Port
from dataflow.regions import moved_by
from dataflow.rows import writers
from dataflow.rules.context import Context, counted, line_of
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
        return _model_of(self.node)

    @property
    def generations(self) -> list[Node]:
        """Each once."""
        return list(dict.fromkeys(maker for makers in self.samples for maker in makers))

    @property
    def strangers(self) -> list[Node]:
        """Generations of other Models that wrote whole rows. Where the trained Model wrote some
        tokens of a row, those of others are its surroundings, such as a simulated user.
        """
        foreign = [each for each in self.samples if not any(map(self.is_own, each))]
        return list(dict.fromkeys(maker for makers in foreign for maker in makers))

    @property
    def unsampled(self) -> str:
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
    for each in _terms(context):
        corrected = each.term.corrected
        reasons = [*_several_updates(each.node)]
        if not corrected:
            reasons += [*_older(each), *_of_others(context, each)]
        if not each.term.function.on_policy or not reasons:
            continue
        problem = (
            "it has no ratio, so its gradient is biased on rows of other weights than those that"
            f" are trained; {', and '.join(reasons)}"
        )
        fix = "clipped_policy_loss(advantage), or one update a Step on rows of lag 0"
        if not corrected and (each.strangers or each.unsampled):
            rows = f"rows of generate({each.model.name}, ...)"
            fix = f"{rows}, or supervised_loss() to imitate these"
        yield each.warning("no_ratio", problem, fix)


def ratios_with_other_policies(context: Context) -> Iterator[GraphWarning]:
    """A loss with a ratio, on rows of a Model that does not come along as the trained one moves."""
    for each in _terms(context):
        strangers = each.strangers
        if not each.term.function.recorded or each.term.corrected or not strangers:
            continue
        trained = each.model.name
        wrote = _who_wrote(context, each, strangers[0])
        fix = f"rows of generate({trained}, ...), or of a Model that follows {trained!r}"
        if f"{each.term.label}.old" in each.node.inputs:
            problem = (
                f"{wrote}; its ratio starts from {trained!r} itself (old=), so nothing weighs the"
                f" rows by how likely {trained!r} is to write them, and its gradient is biased"
            )
            fix += ", or correction=importance()"
        else:
            problem = (
                f"{wrote}; its ratio grows as {trained!r} learns, until the bounds of the loss"
                " hold every token and nothing is learnt (policy/clip_fraction)"
            )
        yield each.warning("other_policy", problem, fix)


def greedy_rows(context: Context) -> Iterator[GraphWarning]:
    """A policy is trained on its likeliest answers: the gradient assumes samples. Of several equal
    answers to a prompt, greedy_groups (suspect_graphs.py) tells.
    """
    for each in _terms(context):
        function, node = each.term.function, each.node
        of_policy = function.on_policy or function.recorded or function.correction
        greedy = [m for m in each.generations if greedy_by(m) and m.params.get("n") == 1]
        if of_policy and greedy:
            maker, by = greedy[0], greedy_by(greedy[0])
            problem = (
                f"its rows are the greedy answers of {maker.name!r}"
                f" ({line_of(maker, node.origin)}, {by}): they are no sample of what the policy"
                " writes, and the gradient is biased"
            )
            sampling = "temperature=1.0" if by != "top_k=1" else "top_k=0"
            yield each.warning("greedy_rows", problem, f"{sampling} in {maker.name!r}")


def policies(context: Context) -> dict[str, str]:
    """For each train node, in words: whose rows it trains, and how old they may be."""
    trained: dict[str, list[_TrainedTerm]] = {}
    for each in _terms(context):
        trained.setdefault(each.node.name, []).append(each)
    phrases = {}
    for name, lag in bounds(context).items():
        old = f"at most {counted(lag, 'version')} old"
        age = f"rows {old}" if lag else "on policy"
        terms = trained.get(name, ())
        others = list(dict.fromkeys(rows for each in terms for rows in _rows_of_others(each)))
        if not others:
            phrases[name] = age
        elif any(_has_own_rows(each) for each in terms):
            phrases[name] = f"{age}, but for {' and '.join(others)}"
        else:
            phrases[name] = " and ".join(others) + (f", {old}" if lag else "")
    return phrases


def _rows_of_others(each: _TrainedTerm) -> Iterator[str]:
    """Rows that no version of the trained Model has sampled. A Model with another head writes none:
    its rows are those of a policy, which may be greedy.
    """
    writes = each.model.head == "lm"
    for maker in each.strangers if writes else ():
        yield f"rows that {maker.name!r} writes with {_model_of(maker).name!r}"
    for maker in each.generations:
        if each.is_own(maker) and _is_average(maker):
            yield f"rows that {maker.name!r} writes with {_model_of(maker).name!r}"
        elif greedy_by(maker) and (each.is_own(maker) or not writes):
            yield f"greedy answers of {maker.name!r}"
    if writes and each.unsampled:
        yield f"rows of {each.unsampled!r}"


def _has_own_rows(each: _TrainedTerm) -> bool:
    """Whether a version of the trained Model sampled some; of one that writes none, a policy."""
    writes = each.model.head == "lm"
    own_makers = [maker for maker in each.generations if each.is_own(maker) or not writes]
    return any(not _is_average(maker) and not greedy_by(maker) for maker in own_makers)


def _is_average(maker: Node) -> bool:
    """Whether a generation computes with a mean of several versions, which is none of them."""
    return any(model.rate != 1.0 for model in _with_leaders(maker) if model.follows is not None)


def _terms(context: Context) -> Iterator[_TrainedTerm]:
    """Every term of a loss whose weight is not 0."""
    lags = row_lags(context)
    for node in context.graph.nodes:
        loss = node.params.get("loss")
        for term in loss.terms if isinstance(loss, Loss) else ():
            rows = node.inputs.get(term.on)
            if rows is not None and term.weight != 0:
                lag, samples = lags[node.name, term.on], context.samplers.of(rows)
                yield _TrainedTerm(node=node, term=term, lag=lag, rows=rows, samples=samples)


def _several_updates(node: Node) -> Iterator[str]:
    """All updates of a Step but the first are on rows of older weights."""
    epochs, parts = node.params["epochs"], node.params["minibatches"]
    if epochs * parts > 1:
        updates = f"{node.name} makes {epochs * parts} updates a Step"
        yield f"{updates} (epochs={epochs}, minibatches={parts})"


def _older(each: _TrainedTerm) -> Iterator[str]:
    """Why rows are of an older version of the trained Model."""
    own_makers = [maker for maker in each.generations if each.is_own(maker)]
    copies = [
        model for maker in own_makers for model in _with_leaders(maker) if model.follows is not None
    ]
    if each.lag > 0:
        slow = [f": {m.name!r} moves every {m.every} Steps" for m in copies if m.every > 1]
        yield f"rows may be {counted(each.lag, 'version')} old{''.join(slow[:1])}"
    for model in copies:
        if model.rate != 1.0:
            yield f"rows are written with {model.name!r}, which follows at rate={model.rate:g}"


def _of_others(context: Context, each: _TrainedTerm) -> Iterator[str]:
    """Why rows are of no version of the trained Model."""
    for maker in each.strangers:
        yield _who_wrote(context, each, maker)
    if each.unsampled:
        yield f"no Model wrote the rows of {each.unsampled!r}"


def _who_wrote(context: Context, each: _TrainedTerm, maker: Node) -> str:
    model = _model_of(maker)
    line = line_of(maker, each.node.origin)
    which = "which nothing trains"
    if model.name in context.trained:
        which = f"another Model than {each.model.name!r}"
    return f"its rows are written by {maker.name!r} ({line}) with {model.name!r}, {which}"


def _with_leaders(maker: Node) -> list[Model]:
    """The Model of a generation, and those from which it copies."""
    model = _model_of(maker)
    return [model, *moved_by(model)]


def _model_of(node: Node) -> Model:
    return next(state for state in node.states.values() if isinstance(state, Model))

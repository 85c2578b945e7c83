"""Scalar heads: the class of a critic or a reward model, for every decoder that transformers knows.

Owns: which class a base is loaded as, the class where transformers has none, and which linear of a
module is its head. Does not own: loading (models.py), what a base must contain (soundness.py), the
forward (heads.py).

A saved directory is always one that transformers can read where it has a class for it, or will
have one: a linear [1, hidden] named `score` on the backbone.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForTokenClassification

HEADS = ("score", "classifier")
"""The names that transformers gives to the linear after the last hidden state."""


def scalar_class(config: Any) -> type[PreTrainedModel]:
    """Choose the class of a module with a scalar head.

    That of the base, if it is a token or sequence classifier. Else the token classifier with a
    head named `score`; else the sequence classifier; else one that is made here.
    """
    autos: tuple[Any, ...] = (AutoModelForTokenClassification, AutoModelForSequenceClassification)
    classifiers: list[Any] = [auto._model_mapping.get(type(config), None) for auto in autos]
    base_classes = config.architectures or []
    for classifier in classifiers:
        if classifier is not None and classifier.__name__ in base_classes:
            return classifier
    token, sequence = classifiers
    # The head of this one is named `score`; others have heads of their own.
    if token is None or not issubclass(token, GenericForTokenClassification):
        return sequence or _make_class(config)
    return classifiers[0]


def head_name(module: nn.Module) -> str:
    """Find the name of the linear that a scalar module ends in."""
    return next(name for name in HEADS if hasattr(module, name))


def scalar_head(module: nn.Module) -> nn.Module:
    """Find the linear that a scalar module ends in: [..., hidden] -> [..., 1]."""
    return module.get_submodule(head_name(module))


def _make_class(config: Any) -> type[PreTrainedModel]:
    """Make the class that transformers' sequence classifiers of newer architectures are: the
    backbone and a linear without a bias.
    """
    body: Any = AutoModel._model_mapping[type(config)]  # type: ignore[attr-defined]
    # The architecture's own base class, with its initialisation and the name of its backbone.
    bases = body.__mro__[1:]
    parent = next(base for base in bases if base.__name__.endswith("PreTrainedModel"))

    def begin(self: Any, config: Any) -> None:
        parent.__init__(self, config)
        setattr(self, parent.base_model_prefix, AutoModel.from_config(config))
        width = self.get_input_embeddings().weight.shape[1]
        self.score = nn.Linear(width, config.num_labels, bias=False)
        self.post_init()

    name = f"{parent.__name__.removesuffix('PreTrainedModel')}ForSequenceClassification"
    return type(name, (parent,), {"__init__": begin, "__module__": __name__})

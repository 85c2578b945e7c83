"""Every operator on columns and every loss keeps what it promises, ours and those of the examples;
and each promise catches what breaks it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

import operators
from dataflow import Columns, Port, Reward, Rollout, Schema, TokenReward, column, operator
from dataflow.loss import Loss
from dataflow.node import Node
from dataflow.testing import Contract, ContractError, contract
from operators.importance import importance
from operators.losses import clipped_policy_loss, entropy_loss, policy_gradient_loss, value_loss
from operators.reward import reward
from tests.contracts import broken_losses, broken_operators

FEW = 6
"""Examples of each promise in `make test`."""

MANY = 100

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

NOT_ON_COLUMNS: set[str] = set()
"""Operators with kernels of their own, which have tests of their own."""

SETTINGS: Mapping[str, list[dict[str, Any]]] = {
    "overlong_penalty": [{"max_tokens": 4, "buffer": 2}],
    "kl_in_reward": [{"beta": 0.1}],
    "trajectory_balance_loss": [{"beta": 0.5}],
    "gae": [{}, {"ports": {"score": TokenReward}}],
    "add": [{}, {"ports": {"scores": TokenReward}}, {"weights": (0.5, 2.0)}],
    "policy_gradient_loss": [{}, {"correction": importance()}],
}
"""How a part is called, where its defaults are not all: parameters without a default, ports that
may carry more.
"""

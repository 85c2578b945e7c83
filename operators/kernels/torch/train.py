"""The train kernel: all updates of a Step on one module, at once or part by part.

Owns: what is opened for a node, and the kernel's state on disk. Does not own: settings
(train_settings.py), micro-batches and updates (training_loop.py), parts (part_training.py), the
backward pass (loss_backward.py), the optimizer (optimizer.py), collectives (parallel.py).

The module may also generate in this process: it stays in eval mode, its weights change in place,
and no gradient outlives a Step, or the computation of one of its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflow.batch import Ragged
from dataflow.kernel import Assignment, KernelNode, Layout, Piece, Session
from dataflow.kernel_abilities import Limited, PartTrainer, Probeable, Sleeper
from dataflow.memory_limits import MemoryLimits, MemoryNeed
from dataflow.training_parts import why_not_in_parts
from operators.kernels.torch.adapter_metrics import AdapterMetrics
from operators.kernels.torch.base_piece import base_pieces
from operators.kernels.torch.context_ranks import ContextRanks, require_heads
from operators.kernels.torch.decoder_layers import find_decoder_layers
from operators.kernels.torch.loss_backward import LossBackward
from operators.kernels.torch.models import (
    find_position_limit,
    load_pieces,
    open_module,
    pieces,
    read_pieces,
    whole_pieces,
)
from operators.kernels.torch.optimizer import Optimizer, require_adamw, save_optimizer_state
from operators.kernels.torch.parallel import Ranks, collect_pieces, part_like
from operators.kernels.torch.part_training import PartTraining
from operators.kernels.torch.probe import compute_probe, vocabulary_of
from operators.kernels.torch.recompute import recompute_layers
from operators.kernels.torch.saving import save_model
from operators.kernels.torch.step_progress import StepProgress
from operators.kernels.torch.train_settings import TrainSettings
from operators.kernels.torch.training_loop import TrainingLoop
from operators.kernels.torch.training_module import prepare_module

OPTIMIZER_FILE = "optimizer.pt"


class TorchTrain(PartTrainer, Limited, Sleeper, Probeable):
    """train: `step` makes epochs * minibatches updates, one optimizer step each.

    params besides those of `train`: sampler_temperature of the recorded log-probs (None: the same;
    rows where it differs, as 0.0 does, are not in policy/mismatch); max_tokens and step_rows:
    the longest answer (the mean of several samplers' longest) and the rows of a full Step, whose
    product divides aggregate="constant"; own_rows: these four of each row set that terms of the
    loss have of their own. temperature None or 0.0 means 1.0; it and sampler_temperature may be
    tuples, with one number for each of a prompt's samples. Metrics: optim/lr, optim/grad_norm (mean
    over updates), optim/updates, optim/skipped (updates without a trained token), optim/changed
    (weight_sample.py; only if an update was made), loss/<label>, train/tokens (trained tokens of
    all epochs), train/fed_tokens, train/micro_batches, policy/sampled_entropy, those of
    mismatch.py and adapter_metrics.py, and those of the formulas. own_samples: whether the trained
    Model wrote the rows, one bool or one for each of a prompt's samples; only those count in
    policy/sampled_entropy.
    """

    def open(self, node: KernelNode, layout: Layout, session: Session) -> None:
        """Raises KernelError for parameters that this kernel cannot honour."""
        torch.set_num_threads(layout.threads)
        model = node.models["model"]
        self._model = model
        settings = TrainSettings.of(node, model)
        self._module = open_module(session, model, is_split=layout.partial)
        self._device = next(self._module.parameters()).device
        self._ranks = Ranks(session, self._device, node.name, layout.tensor, layout.context)
        # Before the splitting, which gives them classes of other names.
        self._layers = find_decoder_layers(self._module)
        self._split, self._slices = prepare_module(
            self._module, layout, session, self._ranks, node.name
        )
        adamw = require_adamw(node.params.get("optimizer", "adamw"), node.name)
        # After the splitting: the optimizer takes this rank's part of each weight.
        self._optimizer = Optimizer(
            self._module,
            adamw,
            settings.clip_norm,
            self._slices,
            offload=layout.offload == "optimizer",
        )
        is_alone = session.world == 1
        self._progress = StepProgress(node.name, layout.tokens, is_alone=is_alone)
        self._loop = self._make_loop(node, layout, settings, session.seed)
        why_not = why_not_in_parts(settings.loss, node.params)
        self._parts = PartTraining(self._loop, why_not=why_not, in_step=layout.in_step)
        self._steps = 0

    def _make_loop(
        self, node: KernelNode, layout: Layout, settings: TrainSettings, seed: int
    ) -> TrainingLoop:
        """Put together what trains; after the splitting."""
        backward = LossBackward(
            node.name,
            self._module,
            settings.row_sets,
            self._optimizer,
            scalar=self._model.head == "scalar",
            split=self._split,
            slices=self._slices,
            context=self._make_context(node, layout),
        )
        return TrainingLoop(
            node=node.name,
            model=self._model.name,
            seed=seed,
            settings=settings,
            backward=backward,
            optimizer=self._optimizer,
            ranks=self._ranks,
            adapter=AdapterMetrics(self._module, self._ranks),
            progress=self._progress,
            position_limit=find_position_limit(self._model.base),
            vocabulary=self.vocabulary,
            is_split=self._split is not None,
        )

    def _make_context(self, node: KernelNode, layout: Layout) -> ContextRanks | None:
        """What divides the tokens of a micro-batch; None where each rank has all of them. Raises
        KernelError for a module whose heads do not divide.
        """
        if layout.context == 1:
            return None
        require_heads(self._module, layout.context, layout.tensor, node.name)
        return ContextRanks(self._ranks.context_group, self._device)

    def step(self, assignment: Assignment) -> Mapping[str, float]:
        """Make all updates of one Step. Raises KernelError if a loss or gradient is not finite.

        A Step that fails is lost; it fails on all ranks, with the same message; but see Limited.
        """
        self._parts.forget_parts()
        self._steps = assignment.step
        return self._loop.step(assignment)

    def train_part(self, assignment: Assignment) -> None:
        """As in PartTrainer. Raises KernelError if a loss is not finite, or if the node needs all
        rows of a Step at once.
        """
        self._progress.begin_part()
        self._parts.train_part(assignment)

    def finish_parts(self, step: int) -> Mapping[str, float]:
        """As in PartTrainer. Raises KernelError, on all ranks, if a gradient is not finite."""
        self._steps = step
        self._progress.begin_part()
        return self._parts.finish_parts(step)

    def forget_parts(self) -> None:
        """As in PartTrainer."""
        self._parts.forget_parts()

    def limit(self, limits: MemoryLimits) -> None:
        """As in Limited: smaller micro-batches, and layers computed again."""
        self._progress.budget = limits.tokens
        if limits.recompute == "layers" and self._layers:
            recompute_layers(self._module, self._layers)

    def give_back(self) -> MemoryNeed:
        """As in Limited: gradients go, and parts that were summed are lost."""
        self._parts.forget_parts()
        self._optimizer.clear()
        return self._progress.fail()

    def pieces(self) -> Iterable[Piece]:
        """The module's own tensors: a caller that keeps them must copy them.

        Split weights are gathered as the first rank takes them; the others take part and get none.
        """
        version_pieces = chain(base_pieces(self._module), pieces(self._module))
        return self._gather(version_pieces)

    def _gather(self, module_pieces: Iterable[Piece]) -> Iterable[Piece]:
        if not self._partial:
            return module_pieces
        return collect_pieces(self._ranks, module_pieces, is_sharded=self._split is not None)

    @property
    def _partial(self) -> bool:
        """Whether this rank has only a part of the weights."""
        return self._split is not None or self._slices is not None

    @property
    def vocabulary(self) -> int:
        """How many token ids the module knows."""
        return vocabulary_of(self._module)

    def probe(self, ids: Ragged) -> np.ndarray:
        """The module's numbers for these rows (probe.py)."""
        within = self._split and self._split.look
        return compute_probe(self._module, ids, head=self._model.head, within=within)

    def save(self, directory: Path) -> None:
        """Write the Model's Hugging Face directory, and optimizer.pt next to its weights."""
        weights, state = self._gather_weights(), None
        # Split state is gathered, which needs every rank; only the first one writes.
        if self._partial or self._ranks.lead:
            state = self._optimizer.state(self._steps)
        if state is not None and self._ranks.lead:
            save_model(self._module, directory, weights, exact=True)
            save_optimizer_state(state, directory / OPTIMIZER_FILE)

    def save_weights(self, directory: Path) -> None:
        """Write the Model's Hugging Face directory, without the state that only training needs."""
        weights = self._gather_weights()
        if self._ranks.lead:
            save_model(self._module, directory, weights)

    def _gather_weights(self) -> dict[str, Tensor] | None:
        """Gather split weights on the first rank's host; None if they are not split.

        Gathers all before anything is written: a full disk must not leave other ranks waiting.
        """
        if not self._partial:
            return None
        saved_pieces = whole_pieces(self._module)
        if self._model.adapter is not None:
            saved_pieces = pieces(self._module)
        return {piece.name: piece.data.cpu() for piece in self._gather(saved_pieces)}

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote, on any number of ranks; the next Step gives the same bits."""
        self.forget_parts()
        self._progress.end()
        targets = {piece.name: piece.data for piece in pieces(self._module)}
        parts: list[Piece] = []
        for piece in read_pieces(self._model, directory, self._device):
            target = targets.get(piece.name, piece.data)
            parts.append(Piece(piece.name, part_like(target, piece.data)))
        load_pieces(self._module, parts)
        self._steps = self._optimizer.restore(directory / OPTIMIZER_FILE)

    def sleep(self) -> None:
        """Move weights and optimizer to the host and free the device; between two Steps."""
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move everything back to where it was."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        self._optimizer.clear()
        module: Any = self._split or self._module
        module.to(device)
        self._optimizer.move(device)
        self._parts.move(device)

    def close(self) -> None:
        """Drop the module and the optimizer, if they were created."""
        for name in ("_parts", "_loop", "_layers", "_optimizer", "_split", "_slices", "_module"):
            vars(self).pop(name, None)

"""Side modules beside a base: how they begin, what they may read, training, files, followers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dataflow import DataError, KernelError, Model, Ragged, side
from dataflow.batch import Batch
from dataflow.kernel import Piece
from operators.kernels.torch.adapters import BaseWeights, named_trained
from operators.kernels.torch.attention import compute_hidden
from operators.kernels.torch.models import (
    load_model,
    load_pieces,
    make_meta_module,
    pieces,
    restore_model,
)
from operators.kernels.torch.probe import compute_probe
from operators.kernels.torch.saving import save_model
from operators.kernels.torch.side_modules import find_side
from operators.kernels.torch.static_rule import decodes_statically, find_capture_obstacle
from tests.kit import side_modules
from tests.kit.kernels import FakeSession
from tests.kit.models import save_tiny
from tests.kit.side_modules import READER, make_reader
from tests.kit.training import (
    LR,
    assignment,
    distance,
    open_supervised,
    steps_of_rows,
    weights_of,
)


def policy(base: str, adapter: Any = READER, **how: Any) -> Model:
    return Model("policy", base, trainable=True, adapter=adapter, **how)


def load(model: Model, weights: BaseWeights | None = None, seed: int = 1) -> Any:
    return load_model(model, "cpu", weights or BaseWeights(), seed)


def numbers(module: Any, head: Any = "lm") -> Any:
    ids = Ragged(np.array([3, 4, 5, 6, 9, 8, 7], np.int32), np.array([0, 4, 7]))
    return compute_probe(module, ids, head=head)


def move(module: Any) -> None:
    """Change all trained weights."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, weight in named_trained(module):
            weight.add_(torch.randn(weight.shape, generator=generator).to(weight.dtype) * 0.1)


def weights_in(module: Any) -> dict[str, Tensor]:
    return {piece.name: piece.data.clone() for piece in pieces(module)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_one_that_adds_zero_is_its_base_to_the_bit(base: str, dtype: Any, head: Any) -> None:
    how = {"dtype": dtype, "head": head}
    module = load(policy(base, **how))
    plain = load_model(Model("plain", base, trainable=True, **how), "cpu")
    assert np.array_equal(numbers(module, head), numbers(plain, head))
    move(module)
    assert not np.array_equal(numbers(module, head), numbers(plain, head))


def test_it_shares_its_base_and_has_its_own_weights(base: str) -> None:
    weights = BaseWeights()
    first, second = (load(policy(base), weights) for _ in range(2))
    assert set(weights_in(first)) == {"side.down.0.weight", "side.down.1.weight", "side.up.weight"}
    shared = {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
    assert len(shared) == len(list(load_model(Model("plain", base), "cpu").parameters()))


def test_it_is_drawn_from_the_seed_and_the_models_name(base: str) -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    first = weights_in(load(policy(base)))
    assert torch.equal(torch.get_rng_state(), before)
    assert distance(first, weights_in(load(policy(base)))) == 0
    assert distance(first, weights_in(load(policy(base), seed=2))) > 0
    other = Model("critic", base, trainable=True, adapter=READER)
    assert distance(first, weights_in(load(other))) > 0
    follower = Model("mean", base, follows=policy(base), rate=0.5)
    assert distance(first, weights_in(load(follower))) == 0


def test_its_shape_is_known_without_weights(base: str) -> None:
    names = {
        piece.name: tuple(piece.data.shape) for piece in pieces(make_meta_module(policy(base)))
    }
    assert names == {name: tuple(w.shape) for name, w in weights_in(load(policy(base))).items()}


def test_a_scalar_head_is_trained_beside_it(base: str) -> None:
    module = load(policy(base, head="scalar"))
    trained_names = {name for name, _ in named_trained(module)}
    assert {name.partition(".")[0] for name in trained_names} == {"side", "score"}


@pytest.mark.parametrize("build,words", [
    (side_modules.make_mixer, "reads other tokens: .* numbers of one token in those of another"),
    (side_modules.make_counter, "reads other tokens: .* other numbers at a token that is alone"),
    (side_modules.make_narrow, "expected a tensor"),
    (side_modules.make_nothing, "expected a torch module, found NoneType"),
    (side_modules.make_constant, "expected parameters to train, found none"),
    (side_modules.make_half_frozen, "down.0.weight, which is not"),
])  # fmt: skip
def test_a_module_that_cannot_be_trained_beside_a_base_is_refused(
    base: str, build: Any, words: str
) -> None:
    with pytest.raises(KernelError, match=f"Model 'policy', side.*{words}"):
        load(policy(base, side(build)))


def test_no_graph_captures_it(base: str) -> None:
    module = load(policy(base))
    assert "side module" in (find_capture_obstacle(module) or "")
    assert not decodes_statically(module)


def test_a_pass_that_failed_leaves_nothing_behind(base: str) -> None:
    module = load(policy(base))
    move(module)
    before = numbers(module)

    def fail(*_: Any) -> None:
        raise RuntimeError("stopped")

    hook = module.base_model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="stopped"):
        numbers(module)
    hook.remove()
    assert np.array_equal(numbers(module), before)


# --- training -------------------------------------------------------------------------------------


def mean_loss(module: Any, part: Any, rows: Batch) -> Tensor:
    """Minus the mean log-prob of the trained tokens, by plain transformers and the side module."""
    prompts, answers = rows.ragged("prompt_ids"), rows.ragged("completion_ids")
    mask = rows.ragged("completion_mask")
    losses: list[Tensor] = []
    for row in range(len(rows)):
        prompt, answer = torch.tensor(prompts[row]), torch.tensor(answers[row])
        ids = torch.cat([prompt, answer])[None].long()
        with torch.no_grad():
            states = list_states(module, ids)
        logits = module.lm_head(part(states[:-1], states[-1]))[0]
        predicted = logits[len(prompt) - 1 : -1].log_softmax(-1)
        logprobs = predicted.gather(1, answer[:, None].long())[:, 0]
        losses.append(-logprobs[torch.tensor(mask[row]) > 0])
    return torch.cat(losses).mean()


def list_states(module: Any, ids: Tensor) -> tuple[Tensor, ...]:
    """What each layer leaves, and what the last norm makes of the last of these."""
    states: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, output: states.append(output))
        for layer in module.model.layers
    ]
    last = module.model(input_ids=ids).last_hidden_state
    for hook in hooks:
        hook.remove()
    return (*states, last)


def test_ten_updates_are_those_of_plain_torch(base: str) -> None:
    session = FakeSession(seed=5, node="train_policy")
    kernel = open_supervised(policy(base), session)
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    part = make_reader(plain.config)
    first = weights_of(kernel)
    part.load_state_dict({name.removeprefix("side."): w for name, w in first.items()})
    optimizer = torch.optim.AdamW(part.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    for step, rows in enumerate(steps_of_rows(), start=1):
        metrics = kernel.step(assignment(rows, step))
        mean_loss(plain, part, rows).backward()
        torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    here = weights_of(kernel)
    plain_weights = {f"side.{name}": p.detach() for name, p in part.named_parameters()}
    assert distance(here, plain_weights) < 1e-5
    squares = [(here[name].double() - first[name].double()).square().sum() for name in here]
    assert metrics["adapter/norm"] == pytest.approx(float(sum(squares)) ** 0.5)
    assert metrics["adapter/bytes"] == sum(weight.nbytes for weight in here.values())
    base_weights = dict(plain.named_parameters())
    for name, parameter in session.modules["policy"].named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(parameter, base_weights[name])
            assert parameter.grad is None


class _Rows:
    """An attention pass of one row."""

    longest = 64

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: Any) -> Tensor:
        from operators.kernels.torch.attention_kind import attend_packed

        del layer
        return attend_packed(query[None], key[None], value[None], kind)[0]


def test_nothing_is_kept_below_it(tmp_path: Path) -> None:
    """What a backward pass keeps does not grow with what is in a layer."""
    sizes: dict[int, int] = {}
    for inner in (16, 256):
        folder = save_tiny(tmp_path / str(inner), intermediate_size=inner)
        module = load(policy(folder))
        saved: set[tuple[int, int]] = set()

        def pack(tensor: Tensor, saved: set[tuple[int, int]] = saved) -> Tensor:
            saved.add((tensor.data_ptr(), tensor.nbytes))
            return tensor

        ids = torch.arange(64) % 90
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            states = compute_hidden(module, ids, torch.arange(64), _Rows())
        assert states.requires_grad
        states.sum().backward()
        sizes[inner] = sum(size for _, size in saved)
        frozen = [p for p in module.parameters() if not p.requires_grad]
        assert all(p.grad is None for p in frozen)
    assert sizes[16] == sizes[256]


# --- files, versions, followers -------------------------------------------------------------------


def test_it_is_saved_and_read_to_the_bit(base: str, tmp_path: Path) -> None:
    module = load(policy(base, head="scalar"))
    move(module)
    save_model(module, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "side_model.safetensors",
        "side_config.json",
    }
    described = json.loads((tmp_path / "side_config.json").read_text())
    assert described == {"function": READER.path, "params": {"width": side_modules.WIDTH}}
    again = load(policy(base, head="scalar"))
    restore_model(again, policy(base, head="scalar"), tmp_path)
    assert distance(weights_in(again), weights_in(module)) == 0


def test_a_frozen_model_begins_with_a_saved_one(base: str, tmp_path: Path) -> None:
    module = load(policy(base))
    move(module)
    save_model(module, tmp_path)
    started = side(make_reader, width=side_modules.WIDTH, start=str(tmp_path))
    frozen = load(Model("reference", base, adapter=started))
    assert np.array_equal(numbers(frozen), numbers(module))


def test_a_saved_one_is_of_its_function_and_base(base: str, tmp_path: Path) -> None:
    save_model(load(policy(base)), tmp_path / "saved")
    other = save_tiny(tmp_path / "other", seed=9)
    with pytest.raises(KernelError, match="trained beside its base"):
        restore_model(load(policy(other)), policy(other), tmp_path / "saved")
    narrow = policy(base, side(make_reader, width=4))
    with pytest.raises(KernelError, match="expected params"):
        restore_model(load(narrow), narrow, tmp_path / "saved")
    weights = tmp_path / "saved" / "side_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(DataError, match="expected 3,392 bytes, found 3,382"):
        restore_model(load(policy(base)), policy(base), tmp_path / "saved")


def test_a_training_goes_on_to_the_bit(base: str, tmp_path: Path) -> None:
    whole, part = open_supervised(policy(base)), open_supervised(policy(base))
    batches = steps_of_rows()[:4]
    for step, rows in enumerate(batches, start=1):
        expected = whole.step(assignment(rows, step))
    for step, rows in enumerate(batches[:2], start=1):
        part.step(assignment(rows, step))
    part.save(tmp_path)
    again = open_supervised(policy(base))
    again.restore(tmp_path)
    for step, rows in enumerate(batches[2:], start=3):
        metrics = again.step(assignment(rows, step))
    assert distance(weights_of(again), weights_of(whole)) == 0
    assert metrics["adapter/norm"] == expected["adapter/norm"]


def test_a_follower_moves_a_part_of_the_way(base: str) -> None:
    leader = load(policy(base))
    follower = load(Model("mean", base, follows=policy(base), rate=0.25))
    before = weights_in(leader)
    move(leader)
    load_pieces(follower, pieces(leader), rate=0.25)
    halfway = {name: w.lerp(weights_in(leader)[name], 0.25) for name, w in before.items()}
    assert distance(weights_in(follower), halfway) < 1e-7


def test_a_follower_of_a_part_computes_in_float32(tmp_path: Path) -> None:
    base = save_tiny(tmp_path, dtype="bfloat16")
    module = load(Model("mean", base, follows=policy(base), rate=0.25))
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}


def test_half_a_version_is_none(base: str) -> None:
    module = load(policy(base))
    half = [Piece(name, weight) for name, weight in weights_in(module).items()][:1]
    with pytest.raises(KernelError, match="expected all weights, found 1"):
        load_pieces(module, half)
    assert find_side(module) is not None
    assert find_side(load(Model("plain", base))) is None

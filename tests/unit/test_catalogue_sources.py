"""The catalogue's coefficients of GPUs are those of the measurements that it names.

Qwen2.5 Speed Benchmark (QwenLM/Qwen2.5, docs/source/benchmark/speed_benchmark.rst): one A100 80GB,
bfloat16, one row, 2,048 tokens after prompts of so many.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from engine.plan.cost.decode import DecodeBatch, schedule_decode
from engine.plan.cost.devices import catalogue_place, coefficients, device
from engine.plan.cost.model_passes import Passes, Sizes, operations
from engine.plan.cost.models import Shape, formula

ANSWER = 2048
PROMPTS = (1, 6144, 14336, 30720)
# layers, hidden, intermediate, heads, kv_heads, head_dim; whether the head is tied; tokens a second
# of vLLM 0.6.3 by PROMPTS; of eager transformers after a prompt of 1.
MODELS = {
    "0.5B": ((24, 896, 4864, 14, 2, 64), True, (311.55, 304.79, 290.28, 264.51), 47.40),
    "1.5B": ((28, 1536, 8960, 12, 2, 128), True, (183.33, 176.68, 168.69, 152.04), 39.68),
    "3B": ((36, 2048, 11008, 16, 2, 128), True, (127.61, 123.15, 117.35, 105.88), 30.80),
    "7B": ((28, 3584, 18944, 28, 4, 128), False, (84.28, 80.70, 77.69, 70.33), 40.38),
    "14B": ((48, 5120, 13824, 40, 8, 128), False, (46.30, 43.83, 41.91, 37.18), 24.74),
}
A100 = device("A100")
GPU = coefficients(A100)


def sizes(name: str) -> Sizes:
    """A model of the benchmark."""
    layers, hidden, intermediate, heads, kv_heads, head_dim = MODELS[name][0]
    shape = Shape(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=151936,
        context=32768,
        tied=MODELS[name][1],
    )
    return Sizes(parameters=formula(shape, {"model_type": "qwen2"}), shape=shape)


def smallest_relative_error(parts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The factors of the parts, [sizes, parts], whose sums are nearest to the seconds."""
    return np.linalg.lstsq(parts / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]


@pytest.mark.parametrize("name", MODELS)
def test_the_speeds_of_an_engine_are_predicted(name: str) -> None:
    for prompt, speed in zip(PROMPTS, MODELS[name][2], strict=True):
        batch = DecodeBatch(
            prompts=np.array([prompt]), answers=np.array([ANSWER]), budget=PROMPTS[-1]
        )
        seconds = schedule_decode(sizes(name), catalogue_place(A100), batch).seconds
        assert seconds == pytest.approx(ANSWER / speed, rel=0.09)


def test_decode_and_prefill_are_the_fit_to_these_speeds() -> None:
    parts, seconds = list[tuple[float, ...]](), list[float]()
    for name, (_, _, speeds, _) in MODELS.items():
        model = sizes(name)
        for prompt, speed in zip(PROMPTS, speeds, strict=True):
            cached = model.cached_bytes * (prompt + ANSWER / 2)
            read = ANSWER * (model.read_bytes + cached) / A100.memory_rate
            fed = operations(model, prompt, prompt**2 / 2, 0.0)
            launches = ANSWER * model.shape.layers
            parts.append((read, launches, fed / A100.operations["bfloat16"], ANSWER))
            seconds.append(ANSWER / speed)
    reads, layer, compute, step = smallest_relative_error(np.array(parts), np.array(seconds))
    assert step < 0, "then none is the best of those that can be"
    columns = np.array(parts)[:, :3]
    reads, layer, compute = smallest_relative_error(columns, np.array(seconds))
    for kind in ("decode", "prefill"):
        found = GPU[kind]
        assert (found.reads, found.compute) == pytest.approx((1 / reads, 1 / compute), abs=0.01)
        assert found.layer == pytest.approx(layer, rel=0.01)
        assert found.step == 0.0


def test_forward_and_train_have_the_launches_of_eager_layers() -> None:
    layers = np.array([shape[0] for shape, _, _, _ in MODELS.values()])
    seconds = np.array([1 / speed for _, _, _, speed in MODELS.values()])
    step, layer = smallest_relative_error(np.stack([np.ones(5), layers], axis=1), seconds)
    for kind in ("forward", "train"):
        assert GPU[kind].step == pytest.approx(step, rel=0.05)
        assert GPU[kind].layer == pytest.approx(layer, rel=0.01)
    # More layers take longer than more parameters do: the weights are not what bounds it.
    assert MODELS["7B"][3] > MODELS["3B"][3]


def test_decodes_collectives_are_those_of_the_small_messages_that_were_measured() -> None:
    h100 = device("H100")
    measured = {4: (4.8e-6, 31.1e-6), 8: (5.9e-6, 33.8e-6)}
    for ranks, (least, most) in measured.items():
        moved = 2 * (ranks - 1) / ranks * 2**20
        found = moved / (h100.link * GPU["decode"].link)
        assert found == pytest.approx(most - least, rel=0.06)
    model = sizes("7B")
    alone, split = (
        Passes(model, catalogue_place(h100, tensor=t), "decode").at(1, 0) for t in (1, 4)
    )
    hops = 2 * model.shape.layers * GPU["decode"].hop
    assert split.latency - alone.latency == pytest.approx(hops)
    assert all(GPU["decode"].hop == pytest.approx(t[0], rel=0.2) for t in measured.values())


def test_collectives_of_large_messages_have_the_share_of_the_ring() -> None:
    for kind in ("prefill", "forward", "train"):
        assert GPU[kind].link == pytest.approx(367.61 / 450, abs=0.005)
        # The rate over the payloads that the latency alone bounds: 32 to 512 KiB.
        taken = [32 * 2**10 / 0.82e9, 512 * 2**10 / 13.68e9]
        assert min(taken) <= GPU[kind].hop <= max(taken)


def test_the_models_come_in_the_order_of_their_size() -> None:
    counts = [sizes(name).parameters for name in MODELS]
    assert all(small < large for small, large in pairwise(counts))

"""What stands in the rows of interact: ids that were fed, and the numbers of those that train."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch, Keys
from dataflow.errors import DataError
from dataflow.kernel import Chunk, Layout
from dataflow.schema import TokenPrompt, TruncatedEpisode
from operators.environments import environments_by
from operators.kernels.text import load_tokenizer
from operators.kernels.torch.forward import TorchLogprobs
from operators.kernels.torch.interact import TorchInteract
from operators.turn_formulas import turn_reward
from tests.kit.environments import Chatter, Hooked, VowelTurns
from tests.kit.episode_rows import columns_of
from tests.kit.generate_suite import MIXED, logprobs_under, tokens_of, weights_of
from tests.kit.interact_kernels import TOLERANCE, open_interact, require_sound, run_episodes
from tests.kit.interact_kernels import kernels as kernels
from tests.kit.kernels import FakeSession, open_kernel, prompt_chunk, rows_chunk
from tests.kit.merging import save_merging
from tests.kit.turns import example_count

TALKS = [[{"role": "user", "content": text}] for text in MIXED]
BOTH = pytest.mark.parametrize("prompts", [MIXED, TALKS], ids=["text", "messages"])


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.kit.models import save_tiny

    return save_tiny(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_merging(tmp_path_factory.mktemp("merging"))


def require_trained_logprobs(batch: Batch, base: str) -> None:
    """The kernel that training uses finds the sampler's numbers, in one forward of whole rows."""
    kernel = open_kernel(TorchLogprobs(), base, layout=Layout(tokens=4096))
    computed = Batch.concat(list(kernel.run(rows_chunk(batch)))).sort()
    is_written = batch.ragged("completion_mask").values == 1
    sampled = batch.ragged("sampler_logprobs").values
    trained = computed.ragged("logprobs").values[is_written]
    np.testing.assert_allclose(trained, sampled[is_written], atol=TOLERANCE, rtol=TOLERANCE)
    assert (sampled[~is_written] == 0).all()
    kernel.close()


@BOTH
def test_log_probs_are_those_of_the_forward_that_trains(
    base: str, kernels: list[TorchInteract], prompts: list[Any]
) -> None:
    kernel = open_interact(base, n=3, layout=Layout(slots=4, tokens=64))
    kernels.append(kernel)
    require_trained_logprobs(run_episodes(kernel, prompts), base)


def test_ids_are_what_was_fed_where_the_tokenizer_splits_text_otherwise(
    merging: str, kernels: list[TorchInteract]
) -> None:
    kernel = open_interact(merging, n=4, max_tokens=200, max_turn_tokens=20)
    kernels.append(kernel)
    batch = run_episodes(kernel, TALKS)
    require_trained_logprobs(batch, merging)
    tokenizer = load_tokenizer(merging)
    split_otherwise = 0
    for row in range(len(batch)):
        ids = batch.ragged("completion_ids")[row]
        messages = json.loads(batch.array("messages")[row].as_py())
        turns = [turn for turn in messages if turn["role"] == "assistant"]
        mask = batch.ragged("completion_mask")[row]
        numbers = batch.ragged("turn")[row]
        for number, turn in enumerate(turns):
            written = ids[(numbers == number) & (mask == 1)].tolist()
            assert turn["content"] == tokenizer.text(written)
            split_otherwise += tokenizer.encode([turn["content"]], special=False)[0] != written
    assert split_otherwise > len(batch)


@settings(max_examples=example_count(12), deadline=None)
@given(
    max_turns=st.integers(1, 5),
    max_tokens=st.integers(1, 70),
    pace=st.sampled_from(["rounds", "free"]),
    position=st.integers(0, 1 << 40),
)
def test_token_rewards_sum_to_the_rewards_of_the_turns(
    base: str, position: int, **how: Any
) -> None:
    session = FakeSession(node="episode")
    kernel = open_interact(base, n=2, session=session, **how)
    chunk = prompt_chunk(MIXED[:3], range(position, position + 3))
    batch = Batch.concat(list(kernel.run(chunk))).sort()
    kernel.close()
    scores = turn_reward(columns_of(batch))
    by_token = scores.batch.ragged("token_reward")
    mask = batch.ragged("completion_mask")
    finals = batch.array("final_reward").to_pylist()
    for row, rewards in enumerate(batch.array("turn_reward").to_pylist()):
        known = [reward for reward in [*rewards, finals[row]] if reward is not None]
        assert by_token[row].sum() == pytest.approx(sum(known), abs=1e-5)
        assert scores["reward"][row] == pytest.approx(sum(known), abs=1e-5)
        assert (by_token[row][mask[row] == 0] == 0).all()
    if "episode/reward" in session.metrics:
        [(mean, count)] = session.metrics["episode/reward"]
        assert mean * count == pytest.approx(scores["reward"].sum(), abs=1e-3)


# --- weights that come meanwhile ------------------------------------------------------------------


def interrupted_rows(
    kernel: TorchInteract, bases: list[str], at: list[int], monkeypatch: pytest.MonkeyPatch
) -> Batch:
    """Rows of a chunk that is interrupted by the calls of environments with these numbers; each
    interruption brings the next weights.
    """
    calls = itertools.count()

    def interrupt() -> None:
        if next(calls) in at:
            kernel.interrupt()

    monkeypatch.setattr(Hooked, "hook", interrupt)
    versions = itertools.count(1)
    batches: list[Batch] = []
    for batch in kernel.run(prompt_chunk(MIXED * 2)):
        batches.append(batch)
        if len(batches) <= len(at):
            version = next(versions)
            kernel.load(iter(weights_of(bases[version % 2])), version)
    return Batch.concat(batches).sort()


@pytest.mark.parametrize("pace", ["rounds", "free"])
def test_new_weights_renew_live_rows_at_once_and_parked_ones_as_they_go_on(
    base: str,
    other: str,
    kernels: list[TorchInteract],
    monkeypatch: pytest.MonkeyPatch,
    pace: str,
) -> None:
    session = FakeSession(node="episode")
    how = {"n": 3, "max_tokens": 120, "layout": Layout(slots=16, tokens=64), "max_lag": 2}
    kernel = open_interact(base, Hooked, session=session, pace=pace, **how)
    kernels.append(kernel)
    batch = interrupted_rows(kernel, [base, other], [4, 33], monkeypatch)
    assert len(batch) == 30
    versions = batch.ragged("version")
    assert all((np.diff(versions[row]) >= 0).all() for row in range(len(batch)))
    assert {len(set(versions[row].tolist())) for row in range(len(batch))} >= {2, 3}
    assert set(versions.values.tolist()) == {0, 1, 2}
    first, later = (logprobs_under(each, batch, 1.0) for each in (base, other))
    expected = np.where(versions.values % 2 == 0, first, later)
    is_written = batch.ragged("completion_mask").values == 1
    sampled = batch.ragged("sampler_logprobs").values
    np.testing.assert_allclose(sampled[is_written], expected[is_written], atol=TOLERANCE)
    assert session.metrics["generate/recomputed"][0][0] > 0


def test_an_interruption_alone_changes_nothing(
    base: str, kernels: list[TorchInteract], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = open_interact(base, Hooked, n=3)
    kernels.append(kernel)
    expected = tokens_of(run_episodes(kernel, MIXED))
    monkeypatch.setattr(Hooked, "hook", kernel.interrupt)
    batches = list(kernel.run(prompt_chunk(MIXED)))
    assert sum(not len(batch) for batch in batches) > 1
    assert tokens_of(Batch.concat(batches)) == expected


# --- samplers, stops, prompts ---------------------------------------------------------------------


def test_a_truncating_sampler_says_what_it_kept(base: str, kernels: list[TorchInteract]) -> None:
    kernel = open_interact(base, n=2, top_p=0.8, temperature=0.9)
    kernels.append(kernel)
    batch = run_episodes(kernel, MIXED)
    assert set(batch.names) == set(TruncatedEpisode.columns)
    mass = batch.ragged("sampler_mass").values
    is_written = batch.ragged("completion_mask").values == 1
    assert (mass[~is_written] == 0).all()
    assert (mass[is_written] < 0).any()
    expected = logprobs_under(base, batch, 0.9)[is_written]
    sampled = batch.ragged("sampler_logprobs").values[is_written]
    np.testing.assert_allclose(sampled, expected, atol=TOLERANCE)


@BOTH
def test_greedy_rows_of_a_group_are_equal(
    base: str, kernels: list[TorchInteract], prompts: list[Any]
) -> None:
    kernel = open_interact(base, n=2, temperature=0.0)
    kernels.append(kernel)
    batch = run_episodes(kernel, prompts)
    rows = list(tokens_of(batch).values())
    assert rows[::2] == rows[1::2]
    require_sound(batch, base, completion=60, context=512)


@BOTH
def test_a_stop_string_ends_a_turn_and_stays_in_it(
    base: str, kernels: list[TorchInteract], prompts: list[Any]
) -> None:
    stops = ("a", "e", "i", "o", "u", "X", "7")
    kernel = open_interact(base, VowelTurns, n=2, stop=stops, max_turn_tokens=20, max_tokens=90)
    kernels.append(kernel)
    batch = run_episodes(kernel, prompts)
    require_sound(batch, base, completion=90, context=512)
    stopped = 0
    for text in batch.array("messages").to_pylist():
        for message in json.loads(text):
            if message["role"] == "assistant":
                content = message["content"]
                assert not any(stop in content[:-1] for stop in stops)
                stopped += content.endswith(stops)
    assert stopped > len(batch)


def test_a_turn_that_ends_by_itself_on_the_rows_last_token_is_shown(
    base: str, kernels: list[TorchInteract]
) -> None:
    how: dict[str, Any] = {"n": 8, "stop": ("a", "e", "i", "o", "u")}
    batches: list[Batch] = []
    most_tokens = [60]
    for _ in range(2):
        kernel = open_interact(base, VowelTurns, max_tokens=most_tokens[-1], **how)
        kernels.append(kernel)
        batches.append(run_episodes(kernel, ["hello"]))
        most_tokens.append(int(min(ends[0] for ends in batches[0].ragged("turn_end"))))
    whole, cut = batches
    [row, *_] = [row for row in range(8) if whole.ragged("turn_end")[row][0] == most_tokens[1]]
    assert most_tokens[1] < 9, "no turn ended by itself"
    reward = whole.array("turn_reward")[row].as_py()[0]
    assert cut.array("turn_reward")[row].as_py() == [reward]
    assert cut.array("finish")[row].as_py() == "length"


def test_prompts_of_token_ids_are_text_to_the_environment(
    base: str, kernels: list[TorchInteract]
) -> None:
    kernel = open_interact(base, VowelTurns, n=2)
    kernels.append(kernel)
    expected = tokens_of(run_episodes(kernel, MIXED))
    keys = Keys.of(range(len(MIXED)))
    ids = load_tokenizer(base).encode_prompts(MIXED)
    batch = Batch.make(keys, {"prompt": ids, "prompt_text": pa.array(MIXED)}, TokenPrompt)
    chunk = Chunk(id=0, step=1, keys=keys, inputs={"prompt": batch})
    assert tokens_of(Batch.concat(list(kernel.run(chunk)))) == expected


def test_a_reset_may_end_with_the_assistants_turn(base: str, kernels: list[TorchInteract]) -> None:
    """Which the model then goes on with."""
    kernel = open_interact(base, Begun, n=1)
    kernels.append(kernel)
    batch = run_episodes(kernel, TALKS[:1])
    shown = load_tokenizer(base).text(batch.ragged("prompt_ids")[0].tolist())
    assert shown == "u:hello\na:Well, "
    require_sound(batch, base, completion=60, context=512)


class Begun(Chatter):
    """Begins the answer itself."""

    def reset(self, seed: int, prompt: Any) -> Any:
        super().reset(seed, str(prompt))
        return [{"role": "assistant", "content": "Well, "}]


def test_each_row_plays_the_environment_that_it_names(
    base: str, kernels: list[TorchInteract]
) -> None:
    kinds = environments_by("prompt", {"hello": VowelTurns, "a": Chatter})
    kernel = open_interact(base, kinds, n=2, inproc=False)
    kernels.append(kernel)
    batch = run_episodes(kernel, ["hello", "a"])
    require_sound(batch, base, completion=60, context=512)
    with pytest.raises(DataError, match="expected 'prompt' to be one of hello, a, found 'zz'"):
        run_episodes(kernel, ["hello", "zz"])
    assert tokens_of(run_episodes(kernel, ["hello", "a"])) == tokens_of(batch)


def test_prompts_too_long_for_the_context_are_given_up_or_cut(
    base: str, kernels: list[TorchInteract]
) -> None:
    how: dict[str, Any] = {"max_context": 20, "n": 2}
    for policy, rows in (("drop", 8), ("truncate", 10)):
        session = FakeSession(node="episode")
        kernel = open_interact(base, VowelTurns, session=session, overlong_prompt=policy, **how)
        kernels.append(kernel)
        batch = run_episodes(kernel, MIXED)
        assert len(batch) == rows
        assert len(session.tombstones) == (10 - rows) // 2
        require_sound(batch, base, completion=60, context=20)
    whole_prompts = load_tokenizer(base).encode_prompts(MIXED)
    long = int(np.argmax(whole_prompts.lengths))
    last_tokens = whole_prompts[long][-19:].tolist()
    assert batch.ragged("prompt_ids")[2 * long].tolist() == last_tokens
    kernel = open_interact(base, VowelTurns, **how)
    kernels.append(kernel)
    with pytest.raises(DataError, match="at most 19 prompt tokens"):
        run_episodes(kernel, MIXED)


def test_rows_end_at_the_positions_of_any_model_that_reads_them(
    base: str, kernels: list[TorchInteract]
) -> None:
    """A graph may state a larger context than some of its Models have positions."""
    session = FakeSession(node="episode")
    kernel = open_interact(base, Chatter, session=session, n=4, max_context=400, positions=40)
    kernels.append(kernel)
    batch = run_episodes(kernel, MIXED)
    require_sound(batch, base, completion=60, context=40)
    assert session.metrics["episode/context/max"] == [(40, 1.0)]

"""Bad models: bases that are missing, damaged, or not what their Model says, and prompts that they cannot read.

Owns: the cases. One child process makes a small good model, spoils a copy of it for each case, and runs each on the
command line; what is held to is one line that names node and file:line with its fix, an exit code, nothing generated,
no traceback, and no process left. `python -m tests.torture.models FOLDER ...` is that child.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from tests.torture.outcome import Outcome

ROOT = Path(__file__).parents[2]
LIMIT = 900.0
"""Seconds for all cases together."""

GRAPHS = '''
"""Graphs for bad models."""
from pathlib import Path

from dataflow.graph import Graph
from dataflow.model import Model
from operators.advantage import gae, group_advantage
from operators.data import demonstrations, prompts
from operators.forward import logprobs, scores, values
from operators.generate import generate
from operators.losses import clipped_policy_loss, policy_gradient_loss, supervised_loss
from operators.reward import reward
from operators.train import train

HERE = Path(__file__).parent
GOOD = str(HERE / "good")


def seen(completions, **columns):
    (HERE / "generated").touch()
    return [float(len(text)) for text in completions]


def rows_of(base, data="text", **asked):
    policy = Model("policy", base, trainable=True)
    source = prompts(str(HERE / f"{data}.jsonl"), batch=2)
    return policy, generate(policy, source, n=2, name="rollout", **({"max_tokens": 4} | asked))


def trained(policy, rollout, score=None, **asked):
    advantage = group_advantage(rollout, score or reward(seen, rollout))
    return Graph("bad", train(policy, rollout, loss=clipped_policy_loss(advantage, **asked), lr=1e-3))


def plain(base: str) -> Graph:
    return trained(*rows_of(base))


def stopped(base: str) -> Graph:
    return trained(*rows_of(base, stop="a"))


def chat(base: str) -> Graph:
    return trained(*rows_of(base, data="messages"))


def long_answers(base: str) -> Graph:
    return trained(*rows_of(base, max_tokens=64))


def long_prompts(base: str) -> Graph:
    return trained(*rows_of(base, data="long"))


def no_prompt_left(base: str) -> Graph:
    return trained(*rows_of(base, data="long", overlong_prompt="drop"))


def of_a_type(base: str) -> Graph:
    return trained(*rows_of(Model("policy", base, trainable=True, dtype="float15").base))


def judged(base: str) -> Graph:
    policy, rollout = rows_of(GOOD)
    return trained(policy, rollout, scores(Model("judge", base, head="scalar"), rollout, name="judge"))


def valued(base: str) -> Graph:
    policy, rollout = rows_of(GOOD)
    critic = values(Model("critic", base, head="scalar"), rollout, name="critic")
    loss = policy_gradient_loss(gae(rollout, reward(seen, rollout), critic))
    return Graph("bad", train(policy, rollout, loss=loss, lr=1e-3))


def taught(base: str) -> Graph:
    policy, rollout = rows_of(GOOD)
    return trained(policy, rollout, reference=logprobs(Model("teacher", base), rollout), beta=0.1)


def shown(base: str) -> Graph:
    policy = Model("policy", base, trainable=True)
    rows = demonstrations(str(HERE / "demos.jsonl"), batch=2)
    return Graph("bad", train(policy, rows, loss=supervised_loss(), lr=1e-3))
'''

Spoil = Callable[[Path, random.Random], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to spoil a good model; `says` is what the refusal has to contain, `node` the name that it gives."""

    name: str
    spoil: Spoil
    says: str
    graph: str = "plain"
    node: str = "rollout"
    at_open: bool = False
    """Whether only the opened kernel can find it; such a case costs seconds."""


# --- ways to spoil ----------------------------------------------------------------------------------------------------


def nothing(folder: Path, draw: random.Random) -> None:
    """Good as it is: what is asked of it is wrong."""


def gone(folder: Path, draw: random.Random) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def a_file(folder: Path, draw: random.Random) -> None:
    gone(folder, draw)
    folder.write_text("GGUF")


def empty(folder: Path, draw: random.Random) -> None:
    for path in folder.iterdir():
        path.unlink()


def without(name: str) -> Spoil:
    return lambda folder, draw: (folder / name).unlink()


def with_text(name: str, text: str) -> Spoil:
    return lambda folder, draw: (folder / name).write_text(text) and None


def with_json(name: str, **changes: Any) -> Spoil:
    """Change fields of a JSON file; None takes one out."""

    def spoil(folder: Path, draw: random.Random) -> None:
        found = json.loads((folder / name).read_text())
        found = {k: v for k, v in (found | changes).items() if v is not None}
        (folder / name).write_text(json.dumps(found))

    return spoil


def cut_short(folder: Path, draw: random.Random) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: draw.randrange(1, len(data))])


def noise(folder: Path, draw: random.Random) -> None:
    (folder / "model.safetensors").write_bytes(draw.randbytes(4096))


def flipped_header(folder: Path, draw: random.Random) -> None:
    """A bit of the header's length, which then points elsewhere."""
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[draw.randrange(3)] ^= 1 << draw.randrange(8)
    (folder / "model.safetensors").write_bytes(bytes(data))


def with_weights(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Spoil:
    def spoil(folder: Path, draw: random.Random) -> None:
        from safetensors.torch import load_file, save_file

        found = change(load_file(folder / "model.safetensors"))
        save_file({k: v.contiguous() for k, v in found.items()}, folder / "model.safetensors", {"format": "pt"})

    return spoil


def filled(name: str, value: float) -> Spoil:
    """One number of a tensor becomes another."""

    def change(weights: dict[str, Any]) -> Mapping[str, Any]:
        weights[name].view(-1)[3] = value
        return weights

    return with_weights(change)


def head(rows: int, value: float) -> Spoil:
    import torch

    return with_weights(lambda w: w | {"score.weight": torch.full((rows, 32), value)})


def in_shards(*, lose: bool, index: str = "") -> Spoil:
    def spoil(folder: Path, draw: random.Random) -> None:
        from safetensors.torch import load_file, save_file

        found = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        places = {tensor: names[i % 2] for i, tensor in enumerate(found)}
        for name in names[: 1 if lose else 2]:
            save_file({t: found[t] for t, p in places.items() if p == name}, folder / name, {"format": "pt"})
        text = index or json.dumps({"metadata": {}, "weight_map": places})
        (folder / "model.safetensors.index.json").write_text(text)

    return spoil


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hostile",)


def hostile_pickle(folder: Path, draw: random.Random) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": _Hostile()}))


def scored(spoil: Spoil) -> Spoil:
    """With a score head, then spoilt."""

    def both(folder: Path, draw: random.Random) -> None:
        head(1, 0.5)(folder, draw)
        spoil(folder, draw)

    return both


CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
THREE_LAYERS = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}


def cases() -> list[Case]:
    """All of them; those that only an open kernel finds are last."""
    few = with_json(CONFIG, max_position_embeddings=16)
    return [
        Case(name="no such directory", spoil=gone, says="found nothing at"),
        Case(name="a file for a directory", spoil=a_file, says="found a file"),
        Case(name="an empty directory", spoil=empty, says="found an empty directory"),
        Case(name="no config.json", spoil=without(CONFIG), says="expected config.json"),
        Case(name="broken config.json", spoil=with_text(CONFIG, '{"model_type": '), says="expected JSON"),
        Case(name="config.json that is a list", spoil=with_text(CONFIG, "[1]"), says="expected a JSON object"),
        Case(name="config.json without a type", spoil=with_json(CONFIG, model_type=None), says="a model_type"),
        Case(name="sizes that are no numbers", spoil=with_json(CONFIG, hidden_size="32"), says="hidden_size"),
        Case(name="a dtype that is none in the files", spoil=with_json(CONFIG, dtype="float15"), says="'float15'"),
        Case(name="a dtype that is none in the graph", spoil=nothing, says="'float15'", graph="of_a_type", node=""),
        Case(name="no weights", spoil=without("model.safetensors"), says="expected weights"),
        Case(name="weights cut short", spoil=cut_short, says="expected"),
        Case(name="weights that are noise", spoil=noise, says="found no header"),
        Case(name="a bit of the header flipped", spoil=flipped_header, says="model.safetensors: expected"),
        Case(
            name="a Git LFS pointer",
            spoil=with_text("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
            says="Git LFS pointer",
        ),
        Case(name="a shard is missing", spoil=in_shards(lose=True), says="-of-00002.safetensors, found none"),
        Case(name="a broken index", spoil=in_shards(lose=False, index="{"), says="expected JSON"),
        Case(name="an embedding of another size", spoil=with_json(CONFIG, vocab_size=120), says="embed_tokens"),
        Case(name="a layer is missing", spoil=with_json(CONFIG, **THREE_LAYERS), says="none of layer 2"),
        Case(name="no tokenizer", spoil=without("tokenizer.json"), says="expected a tokenizer"),
        Case(name="no tokenizer settings", spoil=without(TOKENIZER), says="expected tokenizer_config.json"),
        Case(name="a broken tokenizer", spoil=with_text("tokenizer.json", "{"), says="tokenizer.json: expected JSON"),
        Case(name="ids beyond the embedding", spoil=fewer_embeddings, says="beyond it"),
        Case(
            name="no end of sequence",
            spoil=endless,
            says="found no eos_token",
        ),
        Case(name="an end that is no id", spoil=with_json(GENERATION, eos_token_id="</s>"), says="to be token ids"),
        Case(name="an end beyond the vocabulary", spoil=with_json(GENERATION, eos_token_id=151645), says="151645"),
        Case(name="broken generation_config.json", spoil=with_text(GENERATION, "{"), says="expected JSON"),
        Case(
            name="messages without a template",
            spoil=without("chat_template.jinja"),
            says="no chat template",
            graph="chat",
        ),
        Case(name="answers beyond the positions", spoil=few, says="has 16 positions", graph="long_answers"),
        Case(name="a reward model without a head", spoil=nothing, says="score head", graph="judged", node="judge"),
        Case(name="a critic without a head", spoil=nothing, says="score head", graph="valued", node="critic"),
        Case(name="a head of two numbers", spoil=head(2, 0.5), says="of one number", graph="judged", node="judge"),
        Case(name="a teacher with fewer positions", spoil=with_json(CONFIG, max_position_embeddings=4), says="teacher",
             graph="taught"),
        # What only an open kernel finds.
        Case(name="an unknown architecture", spoil=with_json(CONFIG, model_type="quux"), says="quux", at_open=True),
        Case(name="an unknown activation", spoil=with_json(CONFIG, hidden_act="foo"), says="foo", at_open=True),
        Case(name="a tensor of another shape", spoil=with_weights(shorter), says="found (31,)", at_open=True),
        Case(name="a tensor is missing", spoil=with_weights(headless), says="model.norm.weight", at_open=True),
        Case(name="more layers than the config", spoil=with_json(CONFIG, **ONE_LAYER), says="layers.1", at_open=True),
        Case(name="NaN", spoil=filled("model.layers.1.mlp.up_proj.weight", float("nan")), says="found nan", at_open=True),
        Case(name="infinity", spoil=filled("model.norm.weight", float("inf")), says="found inf", at_open=True),
        Case(name="a head of zeros", spoil=head(1, 0.0), says="all zeros", graph="judged", node="judge", at_open=True),
        Case(name="NaN in a head", spoil=scored(filled("score.weight", float("nan"))), says="nan", graph="valued",
             node="critic", at_open=True),
        Case(name="weights that run code", spoil=hostile_pickle, says="expected a model", at_open=True),
        Case(name="a tokenizer of nothing", spoil=with_text("tokenizer.json", "{}"), says="tokenizer", at_open=True),
        Case(name="a template that does not parse", spoil=with_text("chat_template.jinja", "{% for %}"),
             says="chat template", graph="chat", at_open=True),
        Case(name="prompts beyond the positions", spoil=few, says="expected at most 12 prompt tokens",
             graph="long_prompts", at_open=True),
        Case(name="no prompt fits", spoil=few, says="gave", graph="no_prompt_left", at_open=True),
        Case(name="demonstrations beyond the positions", spoil=few, says="expected at most 16 tokens", graph="shown",
             node="demonstrations", at_open=True),
    ]  # fmt: skip


def endless(folder: Path, draw: random.Random) -> None:
    """No file says what ends an answer."""
    with_json(TOKENIZER, eos_token=None)(folder, draw)
    with_json(GENERATION, eos_token_id=None)(folder, draw)


def fewer_embeddings(folder: Path, draw: random.Random) -> None:
    """The weights and the config agree; the tokenizer knows more."""
    with_json(CONFIG, vocab_size=64)(folder, draw)
    with_json(GENERATION, eos_token_id=5)(folder, draw)
    with_weights(lambda w: w | {"model.embed_tokens.weight": w["model.embed_tokens.weight"][:64]})(folder, draw)


def shorter(weights: dict[str, Any]) -> Mapping[str, Any]:
    return weights | {"model.norm.weight": weights["model.norm.weight"][:31]}


def headless(weights: dict[str, Any]) -> Mapping[str, Any]:
    return {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the command line did."""

    code: int
    out: str
    err: str


def arguments(case: Case, folder: Path, *more: str) -> list[str]:
    """Of `dataflow run`."""
    target = [str(folder / "bad.py") + f":{case.graph}", "--base", str(folder / "bases" / named(case))]
    return [
        "run",
        *target,
        "--runs",
        str(folder / "runs"),
        "--name",
        named(case),
        "--steps",
        "1",
        "--threads",
        "1",
        *more,
    ]


def named(case: Case) -> str:
    return re.sub("[^a-z]+", "_", case.name.lower())


def here(case: Case, folder: Path) -> Said:
    """The command line as a call in this process."""
    from engine.cli import main

    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments(case, folder, "--no-progress"))
    return Said(code=code, out=out.getvalue(), err=err.getvalue())


def apart(case: Case, folder: Path, *more: str) -> Said:
    """The command line as a process, which has to leave none behind."""
    command = [sys.executable, "-c", "import sys; from engine.cli import main; sys.exit(main())"]
    made = subprocess.Popen(
        [*command, *arguments(case, folder, "--no-progress", *more)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = made.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(made.pid, 9)
        out, err = made.communicate()
        err += "\nhangs"
    left = _of_session(made.pid)
    return Said(code=made.returncode, out=out, err=err + "".join(f"\nprocess left: {each}" for each in left))


def _of_session(session: int) -> list[str]:
    """Processes of a session that are not gone, a second later at most."""
    end = time.monotonic() + 1.0
    while len(found := list(_members(session))) > (session == os.getsid(0)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _members(session: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(name)
    return found


def fault_of(case: Case, folder: Path, said: Said) -> tuple[str, str]:
    """(what did not hold, the line that the user sees)."""
    lines = [line for line in said.err.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    wrong = []
    if said.code == 0:
        wrong.append("exit code 0")
    if "Traceback" in said.err + said.out:
        wrong.append("a traceback")
    if not re.search(r"\bbad\.py:\d+ ", last):
        wrong.append("no file and line in the last line")
    wrong += [f"{part!r} is not in it" for part in (case.says, case.node, "Fix: ") if part not in last]
    if (folder / "generated").exists():
        wrong.append("something was generated")
        (folder / "generated").unlink()
    if list((folder / "runs" / named(case)).glob("samples/*")):
        wrong.append("a Step was made")
    wrong += [line for line in lines if line.startswith(("process left", "hangs"))]
    return "; ".join(wrong), last


def prepare(folder: Path, seed: int) -> None:
    """A good model, a spoilt copy for each case, the graphs, and their data."""
    import shutil

    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    from torch_models import save_tiny

    save_tiny(folder / "good")
    for case in cases():
        copy = folder / "bases" / named(case)
        shutil.copytree(folder / "good", copy)
        case.spoil(copy, random.Random(f"{seed}/{case.name}"))
    (folder / "bad.py").write_text(GRAPHS)
    texts = {
        "text": [{"prompt": "2+2"}] * 8,
        "long": [{"prompt": "a prompt of some length, " * 2}] * 8,
        "messages": [{"prompt": [{"role": "user", "content": "2+2"}]}] * 8,
        "demos": [{"prompt": "2+2", "completion": "it is four, I am told"}] * 8,
    }
    for name, rows in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, seed: int, *, short: bool) -> list[Outcome]:
    """Short: as calls in this process, some of those of open kernels only, and one in several Workers. Else all of them,
    each as a process of its own, and those of open kernels once more in several Workers.
    """
    prepare(folder, seed)
    every, late = cases(), [case for case in cases() if case.at_open]
    drawn = random.Random(seed).sample([case.name for case in late], 6) if short else [case.name for case in late]
    outcomes = []
    for case in every:
        if case.at_open and case.name not in drawn:
            continue
        call = here if short else apart
        outcomes.append(outcome(case, folder, lambda case=case, call=call: call(case, folder)))
    for case in late[:1] if short else late:
        more = ("--workers", "apart", "--overwrite")
        outcomes.append(outcome(case, folder, lambda case=case, more=more: apart(case, folder, *more), kind=", apart"))
    if Path("hostile").exists() or (folder / "hostile").exists():
        outcomes.append(Outcome(part="models", case="weights that run code", fault="the code was run"))
    left = [name for name in _of_session(os.getsid(0)) if not name.startswith(f"{os.getpid()} ")]
    return [*outcomes, Outcome(part="models", case="processes left", fault=", ".join(left))]


def outcome(case: Case, folder: Path, call: Callable[[], Said], kind: str = "") -> Outcome:
    """One case, timed."""
    begun = time.monotonic()
    fault, line = fault_of(case, folder, call())
    return Outcome(part="models", case=case.name + kind, fault=fault, said=line, seconds=time.monotonic() - begun)


def torture(short: bool, seed: int) -> list[Outcome]:
    """Every case, in a child: what it imports and what it leaves is its own."""
    with tempfile.TemporaryDirectory(prefix="torture-models-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tests.torture.models", name, str(seed), "short" if short else "long"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        made = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        found = folder / "outcomes.json"
        if not found.exists():
            said = (made.stderr.strip().splitlines() or [""])[-1]
            return [Outcome(part="models", case="all", fault=f"the child ended with {made.returncode}", said=said)]
        return [Outcome(**each) for each in json.loads(found.read_text())]


if __name__ == "__main__":
    import dataclasses

    place, drawn, length = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    told = [dataclasses.asdict(one) for one in run(place, drawn, short=length == "short")]
    (place / "outcomes.json").write_text(json.dumps(told))

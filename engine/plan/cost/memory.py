"""Peak bytes of a node, by part.

Owns: the formulas and their assumptions. Does not own: the model's sizes (models.py), which modules
are shared, whether it all fits (engine/plan).

    part            held                  by
    weights         always                the first node of those that share a module, or a base
    own_weights     always                the first node of those that share a module on such a
                                          base: of an adapter, a subset, a head
    merged          always                the first decode of those that share such a module with
                                          merge=True: copies of the matrices that an adapter is in
    optimizer       always                train
    offloaded       always                train whose optimizer waits on the host, there; forward
                                          whose weights do, instead of these
    engine          always                a kernel with an engine: its processes, beside the weights
    cache           always                the same, and decode by torch on a GPU (static_decode.py):
                                          keys and values, of a fixed size
    outbox          always                nodes that make rows
    device_columns  always                nodes that make columns declared `device`
    libraries       always                where a profile tells: what the libraries of its kernels
                                          take when they are first used
    snapshot        always                train whose weights others pull: two versions; of ranks
                                          that have a part of them each, the first alone
    copies          always                the same by collectives or IPC, on the writer's device
    fetched         always                nodes that pull weights: a version, in shared memory
    sums            always                train on the parts of a Step: gradients, summed up
    gradients       while the node runs   train; what the sums do not have
    gathered        while the node runs   train whose weights FSDP splits: those of other ranks
    bucket          while the node runs   train whose optimizer waits on the host
    loaded          while the node runs   forward whose weights wait on the host: their copy
    activations     while the node runs   train, forward, decode (of a prefill)
    logits          while the node runs   train, forward, decode
    kv_cache        while the node runs   decode elsewhere
    parked          while the node runs   decode of several turns: keys of rows between two turns

Nodes of one Worker take turns: its peak is what it always holds and the most that one node adds. A
node's parts are those in each of its Workers. What a Worker's process takes itself (the interpreter
and what it imports) comes on top (process_memory.py); what an allocator scatters is counted only
where a profile tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dataflow.attention_paths import AttentionPath
from engine.plan.cost.lengths import Lengths
from engine.plan.cost.models import Shape

LASTING = (
    "weights",
    "own_weights",
    "merged",
    "optimizer",
    "offloaded",
    "engine",
    "cache",
    "outbox",
    "device_columns",
    "snapshot",
    "copies",
    "fetched",
    "libraries",
    "sums",
)
"""Parts that are held between the calls of a node."""

FIRST_USE_PART = "libraries"

VERSION_PARTS = ("snapshot", "copies")
"""Parts of a writer that keeps versions for readers."""

FETCHED_PART = "fetched"
"""Of a reader: a version of the weights, which its host's other readers map, too."""

SHARED_PARTS = ("copies",)
"""Parts on a GPU that stay there while their Worker sleeps: other processes read them."""

HOST_PARTS = ("outbox", "snapshot", "fetched", "engine", "offloaded")
"""Parts that are in host memory even if the node has a GPU."""

CHUNK_LOGITS = 1 << 26
"""Most logits that the torch kernels hold at once (kernels/torch/heads.py)."""

_SHORTEST_BLOCK = 40
"""Queries of a block of attention at least (kernels/torch/shared_attention.py)."""
_FIRST_ROOM = 8
"""Tokens of an answer that a cache begins with (kernels/torch/cache.py)."""
_ID = 8
_FLOAT = 4
WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes of a weight, a gradient or an activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The most that a node does in one Step."""

    lengths: Lengths
    prompts: int
    rows: int
    segments: int = 1
    """Rows of one episode, which are generated one after another."""
    budget: int = 16384
    """Tokens of one micro-batch or prefill."""
    slots: int = 256
    """Rows decoded at once."""
    entropy: bool = False
    """Whether a loss reads it."""
    listed: int = 0
    """Further tokens whose log-probs are computed in each place: the most likely, or those that a
    loss asks for.
    """
    minibatches: int = 1
    """Parts of the rows that are trained one after another, of whole prompts."""
    attention: AttentionPath = "dense"
    """The path of attention over the prefix tree (dataflow/attention_paths.py)."""

    @property
    def decoded_at_once(self) -> int:
        """The most rows that are generated at once."""
        return min(self.slots, self.rows // self.segments)

    @property
    def prompts_at_once(self) -> int:
        """The most prompts of these rows: a later row of an episode has a prompt of its own."""
        slots = self.decoded_at_once
        if self.segments > 1:
            return slots
        # The rows in slots may begin and end amid those of a prompt: one more than they fill.
        filled = -(-slots * self.prompts // max(1, self.rows))
        return min(self.prompts, filled + 1)

    @property
    def fed_tokens(self) -> int:
        """Tokens that a model is fed in a Step: each prompt once for all of its completions."""
        return self.prompts * self.lengths.prompt + self.rows * self.lengths.completion

    @property
    def at_once(self) -> int:
        """Tokens of the largest micro-batch: the budget, all of a minibatch, or one larger row."""
        return min(self._part(self.fed_tokens), max(self.budget, self.lengths.row))

    @property
    def gathered(self) -> float:
        """Keys that attention gathers for each token: only the dense path gathers any."""
        if self.attention != "dense":
            return 0.0
        return gathered_keys(self.lengths.row)

    @property
    def predicted_tokens(self) -> int:
        """Tokens of the largest micro-batch that something is predicted for."""
        return min(self.at_once, self._part(self.rows * self.lengths.completion))

    def _part(self, tokens: int) -> int:
        """Tokens of the largest minibatch, out of so many of all prompts."""
        prompts = max(1, self.prompts)
        largest_minibatch = -(-prompts // self.minibatches)
        return -(-tokens * largest_minibatch // prompts)


def optimizer_bytes(parameters: int, dtype: str) -> int:
    """Bytes of AdamW: two float32 moments; narrow weights have a float32 copy (arXiv:1910.02054,
    3.1).
    """
    numbers = 2 if dtype == "float32" else 3
    return parameters * numbers * _FLOAT


def gradient_bytes(parameters: int, dtype: str) -> int:
    """Bytes of float32 gradients; narrow weights add up in float32, with one more of their own
    width.
    """
    if dtype == "float32":
        return parameters * _FLOAT
    return parameters * (_FLOAT + WIDTHS[dtype])


def gathered_keys(row: int) -> float:
    """Keys that attention gathers for a block of queries, over its queries: those of all ancestors
    of the block's first token, and the block itself (kernels/torch/shared_attention.py). Blocks are
    a quarter of a row of so many tokens; three quarters of it lie before them, between a half
    (answers without a prompt) and all of it (short answers to long prompts).
    """
    return 1.0 + 0.75 * row / max(_SHORTEST_BLOCK, row / 4)


def token_activations(shape: Shape, dtype: str, gathered: float = 1.0) -> int:
    """Bytes that the backward pass needs of one token, nothing recomputed. gathered: keys that are
    gathered for each (`gathered_keys`).

    A layer keeps the inputs of its products: two norm inputs and outputs and the residual (5
    hidden), queries and attention output (2 attention, queries once more after their rotation),
    keys and values (each twice, and as gathered for the blocks of the prefix tree), gate, up, their
    activation and product (4 intermediate). After Korthikanti et al. (arXiv:2205.05198, section
    4.1), with the gated MLP and without dropout masks. Attention weights are recomputed
    (FlashAttention, arXiv:2205.14135); paths without such a kernel keep heads * keys a token and
    layer more. One layer's temporary tensors come on top, as in a forward pass. Measured for a
    Qwen2 of 4 x 256 (rows of 80 to 160 tokens, float32, every freed tensor given back at once): 142
    KB a token, by this formula 135 to 150.
    """
    keys = (4 + 2 * gathered) * shape.kv
    layer = 5 * shape.hidden + 3 * shape.attention + keys + 4 * shape.intermediate
    saved = WIDTHS[dtype] * (shape.layers * layer + 2 * shape.hidden)
    return int(saved) + token_forward(shape, dtype, gathered)


def token_forward(shape: Shape, dtype: str, gathered: float = 1.0) -> int:
    """Bytes of one token that tensors have at once in a pass without gradient: the residual and the
    widest part of one layer (`_layer_numbers`). Measured as above: 16.4 KB a token, by this formula
    14.3 to 17.3.
    """
    return int(WIDTHS[dtype] * (2 * shape.hidden + max(_layer_numbers(shape, gathered))))


def token_pass(shape: Shape, dtype: str, gathered: float = 1.0) -> int:
    """Bytes of one token that a pass without gradient takes: the residual, and both parts of a
    layer side by side.

    Both are never there at once, but the blocks of one part do not fit those of the other, and
    what was freed is kept (glibc's heap up to 32 MiB a block, torch's pools on a GPU). Of a Qwen2
    of 2 x 128 and 16230 tokens, tensors had 118 MiB at once (by `token_forward` 135), and the
    process took 215 in its first pass, 255 in all (by this formula 204). In a training pass the
    blocks of one part stay until the backward pass: none is free to be the wrong size.
    """
    return int(WIDTHS[dtype] * (2 * shape.hidden + sum(_layer_numbers(shape, gathered))))


def _layer_numbers(shape: Shape, gathered: float) -> tuple[float, float]:
    """Numbers of one token in the two parts of a layer. Attention: queries, keys and values, the
    first two again after their rotation, what is gathered of the others, queries by block, and the
    output. The MLP: gate, up and their product.
    """
    attention = 4 * shape.attention + (3 + 2 * gathered) * shape.kv
    return attention, 3 * shape.intermediate


def logit_bytes(shape: Shape, tokens: int, *, backward: bool, entropy: bool = False) -> int:
    """Bytes of float32 logits of predicted tokens, at most CHUNK_LOGITS of them at once. A backward
    pass also holds, as large as they are, the gradient of the tokens that were read, the softmax
    that the normaliser's gradient is made of, that gradient, and the sum of both (measured: 5.0
    such tensors together); the entropy, its product.
    """
    logits = min(tokens * shape.vocabulary, max(CHUNK_LOGITS, shape.vocabulary))
    return logits * _FLOAT * (1 + 4 * backward + 2 * entropy)


def listed_bytes(work: Work, *, backward: bool) -> int:
    """Bytes of ids and log-probs of further tokens in each predicted place, never in chunks; with a
    backward pass also their probabilities, the other side's log-probs and a gradient.
    """
    return work.predicted_tokens * work.listed * (_ID + _FLOAT * (1 + 3 * backward))


def kv_bytes(shape: Shape, work: Work, dtype: str) -> int:
    """Bytes of keys and values of the rows decoded at once; a prompt's once for all of its
    completions.

    2 * layers * key heads * head dim a token (Pope et al., arXiv:2211.05102, section 2), with every
    row at max_tokens, for which the torch kernel has room in powers of two of 8 tokens.
    """
    prompts = work.prompts_at_once * work.lengths.prompt
    tokens = prompts + work.decoded_at_once * _answer_room(work)
    return token_keys(shape, dtype) * tokens


def token_keys(shape: Shape, dtype: str) -> int:
    """Bytes of the keys and values of one token."""
    return 2 * shape.layers * shape.kv * WIDTHS[dtype]


def decode_parts(shape: Shape, work: Work, dtype: str) -> dict[str, int]:
    """Parts of generation: the cache, a prefill's activations, the logits of a token for each slot.

    The rows' part of the cache grows after the prefill, but not in what that has left: a larger
    room is made before the smaller one is given back, and it fits into no block of a layer. Of a
    Qwen2 of 8 x 512, 16 prompts of 128 tokens and 128 answers of 64, the prefill took 191 MiB, the
    rest of the cache 263 more (by this formula 64 + 80, and 256 + 16).
    """
    one_prefill = max(work.budget, work.lengths.prompt)
    prefill = min(work.prompts * work.lengths.prompt, one_prefill)
    slots = work.decoded_at_once
    # One layer's smaller room is there beside the larger one, whose half it is.
    grown = shape.kv * WIDTHS[dtype] * slots * _answer_room(work)
    return {
        "kv_cache": kv_bytes(shape, work, dtype),
        "activations": max(prefill, slots) * token_pass(shape, dtype) + grown,
        # Sampling holds logits, their softmax and their running sum; the first rank has all.
        "logits": 3 * slots * shape.vocabulary * shape.sharers * _FLOAT,
    }


def _answer_room(work: Work) -> int:
    """Tokens of an answer that the cache of the torch kernel has room for: _FIRST_ROOM, doubled
    until it is enough.
    """
    rooms = -(-work.lengths.completion // _FIRST_ROOM)
    doublings = max(0, (rooms - 1).bit_length())
    return _FIRST_ROOM << doublings


def forward_parts(shape: Shape, work: Work, dtype: str, head: str) -> dict[str, int]:
    """Parts of a forward pass without gradient over finished rows."""
    gathered = work.gathered
    parts = {"activations": work.at_once * token_pass(shape, dtype, gathered)}
    if head == "lm":
        # Logits and their float32 copy are made once the last layer's blocks are free: what these
        # took is theirs (tensors had 118 MiB at once with 43 of logits, and without).
        freed = work.at_once * sum(_layer_numbers(shape, gathered)) * WIDTHS[dtype]
        logits = 2 * logit_bytes(shape, work.predicted_tokens, backward=False)
        parts["logits"] = max(0, logits - int(freed)) + listed_bytes(work, backward=False)
    return parts


def train_parts(
    parameters: int, shape: Shape | None, work: Work, dtype: str, head: str
) -> dict[str, int]:
    """Parts of training: gradients, optimizer and, for a known shape, the largest micro-batch."""
    gradients, optimizer = gradient_bytes(parameters, dtype), optimizer_bytes(parameters, dtype)
    parts = {"gradients": gradients, "optimizer": optimizer}
    if shape is not None:
        token = token_activations(shape, dtype, work.gathered)
        parts["activations"] = work.at_once * token
        if head == "lm":
            logits = logit_bytes(shape, work.predicted_tokens, backward=True, entropy=work.entropy)
            parts["logits"] = logits + listed_bytes(work, backward=True)
    return parts


def peak(nodes: Iterable[Mapping[str, int]], *, without: tuple[str, ...] = ()) -> int:
    """The peak of nodes that take turns: all that lasts and the greatest of the rest. without:
    parts that do not count.
    """
    always, passing = 0, 0
    for parts in nodes:
        lasting_bytes = lasting(parts, without=without)
        always += lasting_bytes
        whole = sum(size for part, size in parts.items() if part not in without)
        passing = max(passing, whole - lasting_bytes)
    return always + passing


def host_peak(
    workers: Mapping[str, Sequence[Mapping[str, int]]],
    turns: Iterable[Sequence[str]] = (),
    *,
    without: tuple[str, ...] = (),
    gives_back: bool = False,
) -> int:
    """The peak of a host's Workers, each with its nodes' parts: the sum of all, of which in each
    turn group one is awake. gives_back: whether Workers that sleep hold only what is shared, as on
    a GPU; else they keep what lasts.
    """
    peaks = {worker: peak(nodes, without=without) for worker, nodes in workers.items()}
    asleep: dict[str, int] = {}
    for worker, nodes in workers.items():
        if gives_back:
            asleep[worker] = sum(map(_shared_bytes, nodes))
        else:
            asleep[worker] = sum(lasting(parts, without=without) for parts in nodes)
    total, alone = 0, set(workers)
    for group in turns:
        alone -= set(group)
        total += sum(asleep[worker] for worker in group)
        total += max((peaks[worker] - asleep[worker] for worker in group), default=0)
    return total + sum(peaks[worker] for worker in alone)


def _shared_bytes(parts: Mapping[str, int]) -> int:
    return sum(parts.get(part, 0) for part in SHARED_PARTS)


def lasting(parts: Mapping[str, int], *, without: tuple[str, ...] = ()) -> int:
    """Bytes that a node always holds."""
    return sum(size for part, size in parts.items() if part in LASTING and part not in without)

"""What the vLLM kernel of `generate` needs.

Owns: the declaration, of vLLM 0.32. Does not own: the kernel (kernels/vllm).
"""

from __future__ import annotations

from types import MappingProxyType

from dataflow.needs import Needs

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Those whose weights vLLM loads by the names of transformers' modules. It has modules for more
(mixtures of experts among them), for which nobody has looked.
"""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vllm/v1/attention/backends/cpu_attn.py, get_supported_head_sizes."""

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vllm/config/lora.py, MaxLoRARanks: room for an adapter of at most such a rank."""

REQUIRED_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the Worker's process
    # Model Runner V2, which vLLM takes wherever there is Triton, has another interface for logits
    # processors, which keyed.py is not written for.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""Without these the engine cannot run: other values of a user's are refused."""

VLLM = Needs(
    packages=("vllm",),
    install='pip install "dataflow-rl[vllm]" (in a clone: make setup VLLM=1)',
    model_types=MODEL_TYPES,
    dtypes=("bfloat16", "float32"),
    head_sizes=CPU_HEAD_SIZES,
    some_windows=False,
    follower=False,
    shares_module=False,
    own_worker=True,  # once its engine runs, torch.set_num_threads does nothing in its process
    tensor=True,
    adapter_ranks=ADAPTER_RANKS,
    cache=True,
    memory=1 << 29,  # resident size with vLLM imported and running, less that with torch alone
    seconds=10.0,
    pays_off=64,
    on_cpu=(
        "linear layers compute with plain weights; with oneDNN's packed copies, as vLLM ships, it"
        " would write 1.1 to 1.4 times as many tokens a second, load 3 to 13 times as long, hold"
        " these weights twice, and be up to 1.5 times as far from the trainer's log-probs",
    ),  # benchmarks/results/generate.md
    environment=MappingProxyType({
        **REQUIRED_ENVIRONMENT,
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads are the plan's
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }),
    cpu_environment=MappingProxyType({"TORCH_COMPILE_DISABLE": "1"}),  # 11 s to start, for nothing
)  # fmt: skip

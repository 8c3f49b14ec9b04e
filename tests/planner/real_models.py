"""Small real models of every family, and what they really do: saved bytes, FLOPs, bytes alive."""

from __future__ import annotations

import weakref
from collections import defaultdict
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 64, 160, 2, 128
MICRO_BATCH, SEQ_LENGTH = 2, 32

_SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
_MLP = {"intermediate_size": INTERMEDIATE}
_GROUPED = {"num_key_value_heads": 2}  # queries share keys
_WIDE = {"head_dim": 32}  # heads wider than hidden / heads
_GPT2 = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_SIZES, **_MLP, **_GROUPED}),
    "llama_biases": ("LlamaConfig", {**_SIZES, **_MLP, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {**_SIZES, **_MLP, **_GROUPED, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {**_SIZES, **_MLP, **_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_SIZES, **_MLP, **_GROUPED, "head_dim": 16}),
    "gemma": ("GemmaConfig", {**_SIZES, **_MLP, **_GROUPED, **_WIDE}),
    "gemma2": ("Gemma2Config", {**_SIZES, **_MLP, **_GROUPED, **_WIDE}),
    "gemma3": ("Gemma3TextConfig", {**_SIZES, **_MLP, **_GROUPED, **_WIDE}),
    "phi": ("PhiConfig", {**_SIZES, **_MLP, **_GROUPED}),
    "phi3": ("Phi3Config", {**_SIZES, **_MLP, **_GROUPED}),
    "gpt2": ("GPT2Config", {**_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt_neox": ("GPTNeoXConfig", {**_SIZES, **_MLP}),
    "gpt_neox_sequential": ("GPTNeoXConfig", {**_SIZES, **_MLP, "use_parallel_residual": False}),
    "opt": ("OPTConfig", {**_SIZES, "ffn_dim": INTERMEDIATE, "dropout": 0.0}),
    "opt_350m": (
        "OPTConfig",
        {
            **_SIZES,
            "ffn_dim": INTERMEDIATE,
            "dropout": 0.0,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
        },
    ),
}
# One of each kind of layer.
KINDS = ("llama", "gemma3", "phi", "gpt2", "opt")


def config(name: str, **changes: Any) -> Any:
    """A new one each time: building a model writes its dtype into the configuration."""
    import transformers

    kind, fields = FAMILIES[name]
    return getattr(transformers, kind)(**{**_TOKENS, **fields, **changes})


@cache
def model(name: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Any:
    """A model in training mode, shared by tests: none of them steps it."""
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(
        config(name), attn_implementation=attention, dtype=dtype
    )
    return made.train()


def fresh(name: str, dtype: torch.dtype) -> Any:
    """A model of a test's own, with random weights in ``dtype``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config(name), dtype=dtype)


def tokens(micro_batch: int = MICRO_BATCH, seq_length: int = SEQ_LENGTH) -> torch.Tensor:
    return torch.arange(micro_batch * seq_length).remainder(VOCAB).view(micro_batch, seq_length)


def run(network: Any, ids: torch.Tensor | None = None) -> Any:
    """A forward with its loss; the logits go, as a training loop lets them go."""
    ids = tokens() if ids is None else ids
    return network(input_ids=ids, labels=ids, use_cache=False).loss


def saved_bytes(network: Any) -> dict[str, int]:
    """Bytes of the storages that autograd saves of a forward, once each, by where they are saved first:
    "shared" (before the layers and in the first alone), "layer" (the last one), "head" and "all".

    Weights, buffers and integer tensors are left out.
    """
    ours = {t.untyped_storage()._cdata for t in [*network.parameters(), *network.buffers()]}
    sizes: dict[str, int] = defaultdict(int)
    alive: dict[int, Any] = {}  # a storage that is kept alive keeps its address
    place = "before"

    def enter(number: str) -> Any:
        def hook(*_: object) -> None:
            nonlocal place
            place = number

        return hook

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        integer = not (tensor.is_floating_point() or tensor.dtype == torch.bool)
        if storage._cdata not in ours | set(alive) and not integer:
            sizes[place] += storage.nbytes()
            sizes["all"] += storage.nbytes()
        alive[storage._cdata] = storage
        return tensor

    layers = next(m for m in network.modules() if isinstance(m, torch.nn.ModuleList))
    hooks = [m.register_forward_pre_hook(enter(str(i))) for i, m in enumerate(layers)]
    hooks.append(layers[-1].register_forward_hook(enter("head")))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(network)
    for hook in hooks:
        hook.remove()
    return {"layer": sizes[str(len(layers) - 1)], "head": sizes["head"], "all": sizes["all"]}


def flops(network: Any) -> tuple[int, int]:
    """FLOPs of a forward and of a backward as ``torch.utils.flop_counter`` counts them."""
    with FlopCounterMode(display=False) as forward:
        loss = run(network)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    network.zero_grad()
    return forward.get_total_flops(), backward.get_total_flops()


class Alive(TorchDispatchMode):
    """Counts bytes of storages that operations under it made and that are still alive.

    Attributes:
        now, peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def leave_out(self, network: Any) -> None:
        """Do not count a model's weights and gradients."""
        for parameter in network.parameters():
            self.leave_out_memory(parameter, parameter.grad)

    def leave_out_memory(self, *tensors: torch.Tensor) -> None:
        """Do not count what these are in."""
        for tensor in tensors:
            self._seen[tensor.untyped_storage()._cdata] = None

    def _watch(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self.now += nbytes

        def gone(_: object) -> None:
            self.now -= nbytes
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, gone)

"""Bytes of a step by kind on a CUDA device that is not there, of a recipe with the model's own widths, beside the planner's.

python tests/no_gpu/count_bytes.py recipe_70b_24gb --model 70b --layers 80     a line of JSON
"""

from __future__ import annotations

import device

device.require()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections import Counter  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "planner")]

import torch  # noqa: E402
from real_models import Alive  # noqa: E402
from recorder import where  # noqa: E402
from subjects import fake_device, join_ranks  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

MOST_LARGE = 2**20  # bytes of a storage whose maker is not noted
# kind of the planner's -> starts of the lines that make it, low-rank and dense
KINDS = {
    "gathered weights": ("zero/weights/layer_weights.py",),
    "gradients": ("optim/rules/stack.py", "zero/gradients/"),
}


class AliveOn(Alive):
    """Bytes of one kind of device.

    Attributes:
        makers: source lines that made what was alive at the peak, with its bytes.
        peaks: most bytes of each of `KINDS` by itself.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.makers, self.peaks = kind, Counter[str](), Counter[str]()
        self._large: dict[int, tuple[str, int]] = {}

    def begin(self) -> None:
        """Look for the peak of what follows."""
        self.peak = self.now
        self.peaks = Counter({kind: self._made(starts) for kind, starts in KINDS.items()})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and _sums_gradients(*args):
            result = args[0].add_(args[1])
        else:
            result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == self.kind:
                self._note(tensor.untyped_storage())
        if self.now > self.peak:
            self.peak = self.now
            self.makers.clear()
            for line, nbytes in self._alive():
                self.makers[line] += nbytes
        return result

    def _alive(self) -> list[tuple[str, int]]:
        return [made for key, made in self._large.items() if key in self._seen]

    def _made(self, starts: tuple[str, ...]) -> int:
        return sum(nbytes for line, nbytes in self._alive() if line.startswith(starts))

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            return
        self._watch(storage)
        self._large.pop(storage._cdata, None)
        if storage.nbytes() > MOST_LARGE:
            line = where()
            self._large[storage._cdata] = line, storage.nbytes()
            for kind, starts in KINDS.items():
                if line.startswith(starts):
                    self.peaks[kind] = max(self.peaks[kind], self._made(starts))


def _sums_gradients(total: Any, part: Any, *_: Any) -> bool:
    """Whether autograd sums gradients of a weight: in place, unless a tensor is none of torch's own classes."""
    alike = isinstance(part, Tensor) and total.dim() == 2 and total.shape == part.shape
    return alike and where() == "(model, autograd)"


def flash_attention() -> None:
    """Let attention be the op that a GPU has for it; a fake tensor of rows that are not packed is no mask."""
    from transformers import masking_utils

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert attn_mask is None
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]

    masking_utils.find_packed_sequence_indices = lambda ids: None
    torch.nn.functional.scaled_dot_product_attention = attention


def model_of(size: str, layers: int, vocabulary: int) -> nn.Module:
    """A Llama of a named size with fewer layers and tokens, bf16, on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from hmt_deepspeed.planner.model.models import model_shape

    shape = model_shape(size, vocabulary)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        use_cache=False,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(before)
    model._apply = lambda *args, **kwargs: model  # it is where and what the engine wants
    return model


def planned(engine: Any, config: dict[str, Any], seq_length: int) -> dict[str, dict[str, float]]:
    """Bytes by memory and kind of the run as the planner knows it."""
    from hmt_deepspeed.config import HMTConfig
    from hmt_deepspeed.config.components import PAPER_POLICY
    from hmt_deepspeed.planner.hardware import named_machine
    from hmt_deepspeed.planner.solve.cost import estimate
    from hmt_deepspeed.planner.solve.plan import uniform_plan

    facts = engine.run_facts(HMTConfig.from_block(config["hmt"]))
    work = facts.workload(config["train_micro_batch_size_per_gpu"], seq_length)
    machine = named_machine("rtx4090", num_gpus=1)
    policy = PAPER_POLICY | config["hmt"]["activations"]["policy"]
    plan = uniform_plan(work, machine, policy)
    return {**estimate(facts.problem(work, machine), plan).memory}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("recipe", help="name of a file in ds_configs")
    add("--model", default="70b")
    add("--layers", type=int, default=3)
    add("--vocabulary", type=int, default=32000)
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="of hmt.optimizer")
    add("--micro_batches", type=int, help="of a step; default: the recipe's")
    add("--seq_length", type=int, default=1024)
    add("--steps", type=int, default=3)
    args = parser.parse_args()
    import hmt_deepspeed

    config = json.loads((ROOT / "ds_configs" / f"{args.recipe}.json").read_text("utf-8"))
    config["gradient_accumulation_steps"] = (
        args.micro_batches or config["gradient_accumulation_steps"]
    )
    for text in args.set:
        field, _, value = text.partition("=")
        config["hmt"]["optimizer"][field] = json.loads(value)
    flash_attention()
    with fake_device(), AliveOn("cuda") as gpu, AliveOn("cpu") as host:
        join_ranks(1)
        model = model_of(args.model, args.layers, args.vocabulary)
        engine, *_ = hmt_deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        shape = config["train_micro_batch_size_per_gpu"], args.seq_length
        rows = torch.zeros(shape, dtype=torch.long, device="cuda")
        batch = {"input_ids": rows, "labels": rows}
        steps = []
        for _ in range(args.steps):
            gpu.begin()
            host.begin()
            engine.train_batch([batch] * config["gradient_accumulation_steps"])
            numbers = engine.hmt_activations.metrics()
            steps.append(
                {
                    "gpu": gpu.peak,
                    "by kind": gpu.peaks,
                    "host": host.peak,
                    "activations": numbers["activation_peak_host_bytes"],
                    "pinned": numbers["activation_host_bytes"],
                    "makers": dict(gpu.makers.most_common()),
                }
            )
        found = {
            "planned": planned(engine, config, args.seq_length),
            "steps": steps,
            "rest": {"gpu": gpu.now, "host": host.now},
            "parameters": sum(p.ds_numel for p in model.parameters()),
            "weights": sum(p.ds_tensor.nbytes for p in model.parameters()),
            "optimizer states": engine._counted_bytes()["gpu", "optimizer states"],
        }
        print(json.dumps(found), flush=True)
    os._exit(0)  # else the thread of a device that is not there may end the process by itself


if __name__ == "__main__":
    main()

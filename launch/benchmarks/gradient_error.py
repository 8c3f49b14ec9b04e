"""What encoding activations does to gradients, on a model with planted outlier channels."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.results import CaseResult, Measurement
from benchmarks.setting import TOY, Batches, Setting, Shape, engine_config, llama

SHAPE = Shape(512, 8, 8, sequence=1024, micro_batch=4)
OUTLIER, NUM_OUTLIERS = 50.0, 4
ENCODINGS = 16


def gradient_error(setting: Setting) -> CaseResult:
    shape = TOY if setting.toy else SHAPE
    encodings = 4 if setting.toy else setting.rounds_or(ENCODINGS)
    rows = Batches(shape, setting.device).draw()
    exact = next(_gradients(shape, rows, None, 1))
    total: dict[str, Tensor] = {}
    single = []
    for found in _gradients(shape, rows, {}, encodings):
        single.append(_relative_error(found, exact))
        for name, gradient in found.items():
            total[name] = total.get(name, 0) + gradient
        if len(single) == 1:
            cosines = _cosine_per_layer(found, exact)
    averaged = _relative_error({n: g / encodings for n, g in total.items()}, exact)
    label = f"{shape.label}, {NUM_OUTLIERS} channels x {OUTLIER:.0f}"
    expected = encodings**-0.5
    return CaseResult(
        {"model": asdict(shape), "outlier": OUTLIER, "channels": NUM_OUTLIERS},
        [
            Measurement(
                f"{label}: least cosine of a layer's gradient, the paper's table to keeping everything",
                min(cosines.values()),
                "share",
                ">=",
                0.999,
            ),
            Measurement(
                f"{label}: error of the mean over {encodings} encodings / of one",
                averaged / mean(single),
                "share",
                "<=",
                1.5 * expected,
                note=f"unbiased errors fall as one over the root, here to {expected:.3f}",
            ),
            Measurement(f"{label}: relative error of one encoding", mean(single), "share"),
        ],
        {"cosine_per_layer": cosines, "relative_errors": single},
        dtype=("fp32", "the reference is fp32"),
    )


def _gradients(shape: Shape, rows: Tensor, section: dict[str, Any] | None, repeats: int) -> Any:
    """Gradients by parameter name, of one batch again and again; weights never change."""
    import hmt_deepspeed

    model = _with_outliers(llama(shape))
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: found.__setitem__(name, grad.clone()))
    config = engine_config(shape, "fp32", stage=0)
    config["optimizer"]["params"] |= {"lr": 0.0, "weight_decay": 0.0}
    if section is not None:
        config["hmt"] = {"activations": section}
    engine, *_ = hmt_deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for _ in range(repeats):
        engine.backward(engine(input_ids=rows, labels=rows).loss)
        engine.step()
        yield dict(found)
    engine.destroy()


@torch.no_grad()
def _with_outliers(model: Any) -> nn.Module:
    """Some channels of what is encoded, attention's and the MLP's, are far larger; the function is the same."""
    for layer in model.model.layers:
        up, down = layer.mlp.up_proj.weight, layer.mlp.down_proj.weight
        value, output = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
        for into, out_of in ((up, down), (value, output)):
            chosen = torch.arange(NUM_OUTLIERS) * (into.shape[0] // NUM_OUTLIERS)
            into[chosen] *= OUTLIER
            out_of[:, chosen] /= OUTLIER
    return model


def _layer(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:3]) if "layers" in parts else parts[-2]


def _cosine_per_layer(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for name, other in exact.items():
        a, b = found[name].double().flatten(), other.double().flatten()
        for index, product in enumerate((a @ b, a @ a, b @ b)):
            sums[_layer(name)][index] += float(product)
    return {layer: ab / (aa * bb) ** 0.5 for layer, (ab, aa, bb) in sums.items()}


def _relative_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    wrong = sum(float((found[n] - g).double().square().sum()) for n, g in exact.items())
    return (wrong / sum(float(g.double().square().sum()) for g in exact.values())) ** 0.5

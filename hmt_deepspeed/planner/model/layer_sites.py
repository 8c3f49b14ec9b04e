"""Sites: the tensors that a plan makes choices for, in a decoder layer and after the layers.

The sites of a layer, with the heavy ops (matrix products and the attention op) as steps::

    layer_input -> [attention_qkv] -> [attention_output] -> [residual] -> [mlp_intermediate] -> [down]

A site's ``flops`` make it from its ``depends``; norms, activation functions, rotary positions and sums run
again and are not counted. The down projection's output is the next layer's input and is never made again,
but for models where a norm of the layer reads it (Gemma 2 and 3, OPT-350m): there it is ``mlp_output``. Where
linears are projected, one more site is all that they save, the products ``X [Q | P]``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hmt_deepspeed.config.codecs import codec_of, held_bytes
from hmt_deepspeed.config.components import Choice, Component, legal_choices
from hmt_deepspeed.planner.model.flops import LayerFlops
from hmt_deepspeed.planner.model.shapes import ModelShape

__all__ = ["OUTSIDE", "Site", "head_sites", "layer_sites"]

OUTSIDE = -1  # number of the layer of a site that is in none


@dataclass(frozen=True)
class Site:
    """A tensor that backward needs, in ``count`` equal layers.

    Attributes:
        name: unique within a layer: ``layer_input``, ``attention_qkv``, ``attention_output``, ``residual``,
            ``mlp_intermediate``, ``mlp_output``, ``projected_inputs``; outside the layers ``final_norm``,
            ``lm_head``.
        component: whose choice it follows.
        layers: numbers of the layers it stands for, (OUTSIDE,) outside them.
        tokens, channels, itemsize: of the tensor, as computed; of products of one layer, of all together.
        flops: of making it from ``depends``; 0 where nothing heavy makes it.
        raw_bytes: held beside it as they are with every choice but ``recompute`` (log-sum-exp).
        depends: names of the sites of the same layer that making it again reads.
        legal: choices open to it.
    """

    name: str
    component: Component
    layers: tuple[int, ...]
    tokens: int
    channels: int
    itemsize: int
    flops: int
    raw_bytes: int
    depends: tuple[str, ...]
    legal: tuple[Choice, ...]

    @property
    def count(self) -> int:
        """Layers that it stands for."""
        return len(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of one such tensor as computed."""
        return self.tokens * self.channels * self.itemsize

    def moved_bytes(self, choice: Choice) -> int:
        """Bytes that a choice moves off the device and back, of one such tensor."""
        row = codec_of(choice)
        if row is None or not row.is_moved:
            return 0
        return row.nbytes(self.tokens, self.channels, self.itemsize)

    def device_bytes(self, choice: Choice) -> int:
        """Device bytes that one such tensor holds until backward.

        Raises:
            ValueError: a choice that is not legal here.
        """
        if choice not in self.legal:
            raise ValueError(
                f"{self.name} ({self.component}): choice is {choice!r}; legal: {self.legal}. Choose one "
                "of them."
            )
        raw = 0 if choice == "recompute" else self.raw_bytes
        return raw + held_bytes(choice, self.tokens, self.channels, self.itemsize)


# What each site of a layer is made from.
_DEPENDS: dict[str, tuple[str, ...]] = {
    "layer_input": (),
    "attention_qkv": ("layer_input",),
    "attention_output": ("attention_qkv",),
    "residual": ("attention_output",),
    "mlp_intermediate": ("layer_input", "residual"),
    "mlp_output": ("mlp_intermediate",),
    "projected_inputs": ("layer_input", "attention_output", "residual", "mlp_intermediate"),
}


def layer_sites(
    shape: ModelShape,
    numbers: tuple[int, ...],
    tokens: int,
    itemsize: int,
    fused: bool,
    flops: LayerFlops,
) -> tuple[Site, ...]:
    """The sites of a group of equal layers, in forward order."""
    rows: list[tuple[str, Component, int, int]] = [  # name, component, channels, FLOPs
        ("layer_input", "layer_input", shape.hidden, 0),
        (
            "attention_qkv",
            "attention_qkv",
            shape.query_width + 2 * shape.kv_width,
            flops.forward["qkv"],
        ),
        ("attention_output", "attention_output", shape.query_width, flops.attention),
        (
            "mlp_intermediate",
            "mlp_intermediate",
            shape.num_up * shape.intermediate,
            flops.forward["up"],
        ),
    ]
    if not shape.parallel:  # there nothing reads what attention adds
        rows.insert(3, ("residual", "residual", shape.hidden, flops.forward["out"]))
    if shape.sandwich or shape.post_norm:  # a norm reads the down projection's output
        rows.append(("mlp_output", "residual", shape.hidden, flops.forward["down"]))
    if flops.projection_columns:
        rows.append(
            ("projected_inputs", "projected_inputs", flops.projection_columns, flops.projections)
        )
    depends = dict(_DEPENDS)
    if shape.parallel:
        depends["mlp_intermediate"] = ("layer_input",)
        depends["projected_inputs"] = ("layer_input", "attention_output", "mlp_intermediate")
    return tuple(
        Site(
            name=name,
            component=component,
            layers=numbers,
            tokens=tokens,
            channels=channels,
            itemsize=itemsize,
            flops=made,
            raw_bytes=tokens * shape.heads * 4 if fused and name == "attention_output" else 0,
            depends=depends[name],
            legal=legal_choices(component),
        )
        for name, component, channels, made in rows
    )


def head_sites(shape: ModelShape, tokens: int, itemsize: int) -> tuple[Site, ...]:
    """Sites of the inputs of the final norm, where there is one, and of the head."""
    width = shape.embedding_size or shape.hidden
    inputs: list[tuple[str, Component, int]] = [("lm_head", "lm_head", width)]
    if shape.names.final_norm:
        inputs.insert(0, ("final_norm", "layernorm", shape.hidden))
    return tuple(
        Site(
            name=name,
            component=component,
            layers=(OUTSIDE,),
            tokens=tokens,
            channels=channels,
            itemsize=itemsize,
            flops=0,
            raw_bytes=0,
            depends=(),
            legal=legal_choices(component),
        )
        for name, component, channels in inputs
    )

"""A layer as FPDT meets it: its parameters in the order in which their gradients are summed, and its MLP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hmt_deepspeed.planner.model.listed import LayerGroup, ListedShape, Product
from hmt_deepspeed.planner.model.shapes import ModelShape, Role, layer_linears, parameters

__all__ = ["LayerInChunks", "Mlp", "layers_in_chunks"]


@dataclass(frozen=True)
class Mlp:
    """A layer's MLP: channels for one token, and elements of its weights.

    Attributes:
        up: channels that gate and up put out, of a mixture those of all experts that compute the token.
        rows: channels of the copies of a token that a mixture's experts read, one each; 0 without a mixture.
        routers: channels that routers put out.
        weights, down: elements of all weights that are trained, and of those that lead back to the stream.
    """

    up: int
    rows: int
    routers: int
    weights: int
    down: int


@dataclass(frozen=True)
class LayerInChunks:
    """``count`` equal layers.

    Attributes:
        parameters: elements of all that are trained.
        projections, finish: elements of each before attention, and of each after it, in the order of the layer.
    """

    count: int
    parameters: int
    projections: tuple[int, ...]
    finish: tuple[int, ...]
    mlp: Mlp


def layers_in_chunks(shape: ModelShape) -> tuple[LayerInChunks, ...]:
    """The layers of a model, one of each kind."""
    if isinstance(shape, ListedShape):
        return tuple(_listed(group, shape.names.layer) for group in shape.groups)
    linears = layer_linears(shape)

    def of(*roles: Role) -> tuple[int, ...]:
        return tuple(linear.elements for linear in linears if linear.role in roles)

    whole = sum(p.numel for p in parameters(shape) if p.name.startswith(shape.names.layer))
    mlp = Mlp(
        up=shape.num_up * shape.intermediate,
        rows=0,
        routers=0,
        weights=sum(of("up", "down")),
        down=sum(of("down")),
    )
    return (LayerInChunks(shape.layers, whole, of("qkv"), of("out", "up", "down"), mlp),)


def _listed(group: LayerGroup, layer: str) -> LayerInChunks:
    products = group.tokens.products
    trained = {p.name.removeprefix(f"{layer}."): p.numel for p in group.parameters if p.trained}
    up = [product for product in products if _role(product) == "up"]
    down = [product for product in products if _role(product) == "down"]
    projections = _elements(trained, (p for p in products if p.place == "qkv"))
    back = _elements(trained, down)
    mlp = Mlp(
        up=round(sum(product.outputs for product in up)),
        rows=round(sum(product.inputs for product in up if product.place == "experts")),
        routers=group.tokens.outputs("router"),
        weights=sum((_elements(trained, up) | back).values()),
        down=sum(back.values()),
    )
    finish = (size for name, size in trained.items() if name not in projections)
    return LayerInChunks(
        len(group.numbers), sum(trained.values()), tuple(projections.values()), tuple(finish), mlp
    )


def _role(product: Product) -> Role | None:
    """Its place in the MLP, also of experts whose backward cannot be projected."""
    if product.place == "experts" and product.experts is None:
        return "down" if "down" in product.name else "up"
    return product.role


def _elements(trained: dict[str, int], products: Iterable[Product]) -> dict[str, int]:
    """Elements of the parameters that products have, by name."""
    modules = tuple(product.name for product in products)
    return {name: size for name, size in trained.items() if name.startswith(modules)}

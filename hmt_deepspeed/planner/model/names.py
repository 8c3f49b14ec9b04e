"""Paths of a model's modules, by its family's row."""

from __future__ import annotations

from dataclasses import dataclass

from hmt_deepspeed.families.family import Family
from hmt_deepspeed.families.table import FAMILIES

__all__ = ["LLAMA_NAMES", "Names", "names_of"]


@dataclass(frozen=True)
class Names:
    """Paths of a family's modules: dotted, ``*`` standing for the layer's number.

    Attributes:
        layer: path of a layer. embedding, positions, final_norm, head: paths from the root; ``positions``
            and ``final_norm`` may be empty.
        qkv, out, up, down: linears of a layer. norms: of a layer, in order. head_norms: of q and k.
    """

    layer: str
    embedding: str
    final_norm: str
    qkv: tuple[str, ...]
    out: str
    up: tuple[str, ...]
    down: str
    norms: tuple[str, ...]
    positions: str = ""
    head: str = "lm_head"
    head_norms: tuple[str, ...] = ()


def names_of(row: Family, has_final_norm: bool = True, has_head_norms: bool = False) -> Names:
    """Names of a family by its row; some models of it may have fewer norms."""

    def within(root: str, name: str) -> str:
        return f"{root}.{name}" if root and name else name

    return Names(
        layer=f"{within(row.base, row.layers)}.*",
        embedding=within(row.base, row.embedding),
        positions=within(row.base, row.positions),
        final_norm=within(row.base, row.final_norm) if has_final_norm else "",
        head=row.head,
        qkv=tuple(within(row.attention, name) for name in row.qkv),
        out=within(row.attention, row.output),
        up=row.up,
        down=row.down,
        norms=row.norms,
        head_norms=tuple(within(row.attention, name) for name in row.head_norms if has_head_norms),
    )


LLAMA_NAMES = names_of(FAMILIES["llama"])

"""The optimizer for use without DeepSpeed: rules, bases, schedule and projected backward composed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hmt_deepspeed import ownership
from hmt_deepspeed.optim.backward.experts import ExpertSite, expert_sites
from hmt_deepspeed.optim.backward.int8_linear import release
from hmt_deepspeed.optim.backward.patches import Patches
from hmt_deepspeed.optim.decisions.refresh import BasisRefreshes
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.settings.assign import (
    ExpertKind,
    assign_rules,
    embedding_weights,
    head_weights,
    left_dense,
    linear_weights,
)
from hmt_deepspeed.optim.settings.options import (
    check_group,
    complete_options,
    matrix_settings,
    module_rules,
)
from hmt_deepspeed.optim.slot import ParameterRow, Slot
from hmt_deepspeed.optim.stacked_step import StackedStep

__all__ = ["HMT", "MARK", "ParameterRow"]

MARK = "hmt"  # in every group: whoever builds another optimizer of these groups can be told apart


class HMT(Optimizer):
    r"""AdamW whose gradients and states live in a low-rank space, for use without DeepSpeed.

    Sources: projection ``A = G Q`` and the factor ``scale`` from GaLore (2403.03507); the norm-based
    scaling of what lies outside the basis and its growth limit from Fira (2410.01623); the transfer of
    moments to a new basis from LDAdam (2410.16103), normalised by the share of each direction that the
    old basis spanned; rank by captured energy and staggered refresh from the HMT paper. One step::

        A, S = G Q, G P                       Q: n x r basis, P: n x k random probe columns
        U = Adam(A)
        W <- (1 - lr wd) W - lr scale (U Q^T + c phi o S P^T)

    Without a ``scale`` it is 2.5, GaLore's 0.25 at ten times AdamW's rate, and embeddings, heads and vectors take five
    times ``lr``; decay is not multiplied.

    Given a module, its low-rank linears and experts get the projected backward: ``[A | S]`` comes out of backward
    and the weight gradient is formed only in the accumulation window before a basis refresh. Given tensors, groups
    or ``named_parameters()``, ``p.grad`` is projected, and nothing is allocated before the first step.
    Bare tensors are named ``param_<i>``; names seed the random draws and are matched by the patterns.

    What backward has accumulated is a gradient like ``p.grad``: :meth:`zero_grad` drops it, and so does
    that of the module or of a module in it (not of one that holds it), ``step`` uses it up. Under data
    parallelism and loss scaling (``torch.amp.GradScaler`` sees ``p.grad`` only) go through the DeepSpeed
    engine, or pass ``named_parameters()``.

    Args:
        params: a module, tensors, groups, or (name, parameter) pairs; fp32, bf16 or fp16.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``; every group may have its own, of these only.
        fields: the fields of ``hmt.optimizer``, with the same defaults and meaning
            (hmt_deepspeed/config/README.md).

    An optimizer that has patched a module is taken apart when another one, or an engine, is built on parameters of
    its own (:mod:`hmt_deepspeed.ownership`).

    Raises:
        ValueError: for every value out of range, combination that cannot work, and field that nothing would read;
            for parameters in whose backward another owner is.
        TypeError: for an unknown field.
    """

    dropped = False  # it goes with its last reference

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **fields: Any,
    ) -> None:
        self.options = complete_options(fields)
        self._settings = matrix_settings(self.options)
        self._rules = module_rules(self.options)
        self._slots: dict[Tensor, Slot] = {}
        self._patches = Patches()
        self._stacked = StackedStep()
        self._bases = BasisRefreshes(self.options)
        self._linear_names: set[str] | None = None
        self._head_names: set[str] = set()
        self._embedding_names: set[str] = set()
        self._experts: Mapping[str, ExpertKind] | None = None
        self._steps = 0
        self._taken_by: str | None = None
        model = params if isinstance(params, nn.Module) else None
        if model is not None:
            params = _trainable(model)
        elif self.options["weight_dtype"] == "int8":
            raise ValueError(
                "hmt.optimizer.weight_dtype is 'int8', but HMT was given parameters, not a module, whose "
                'forward would decode the weights. Legal here: "auto". To do: pass the module itself.'
            )
        elif self.options["share_basis"]:
            raise ValueError(
                "hmt.optimizer.share_basis is True, but HMT was given parameters, not a module: who "
                "reads the same input shows only in the modules' forward. Pass the module, or False."
            )
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, MARK: True})
        owned = [param for group in self.param_groups for param in group["params"]]
        ownership.take_over(owned, "a new HMT optimizer", warnings.warn)
        if model is not None:
            release(model)  # a deep copy of a module has its INT8 weights, and no owner
            linears = linear_weights(model)
            self._linear_names, self._head_names = set(linears), head_weights(model)
            self._embedding_names = embedding_weights(model)
            sites = expert_sites(model)
            self._experts = {
                name: ExpertKind(site.role, site.is_transposed, site.reason)
                for name, site in sites.items()
            }
            self._build()
            self._patch(model, linears, sites)
            self._prepare()

    # -- construction ---------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, also while training: its matrices get their basis in the coming steps."""
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        index = 0
        for group in self.param_groups:
            names = group.get("param_names")
            for position, param in enumerate(group["params"]):
                yield (names[position] if names else f"param_{index}"), param
                index += 1

    def _build(self) -> bool:
        """Give every trainable parameter that has no slot yet its rule and states; True if any."""
        trainable = [(name, p) for name, p in self._named() if p.requires_grad]
        if all(p in self._slots for _, p in trainable):
            return False
        self._check_dtypes(trainable)
        assigned = assign_rules(
            [(name, tuple(p.shape)) for name, p in trainable],
            settings=self._settings,
            module_rules=self._rules,
            target_modules=self.options["target_modules"],
            linear_names=self._linear_names,
            head_names=self._head_names,
            embedding_names=self._embedding_names,
            expert_weights=self._experts,
        )
        first = next((a.name for a in assigned if a.low_rank), None)
        if self.options["projected_backward"] is True and not self._linear_names and first:
            raise ValueError(
                "hmt.optimizer.projected_backward is True, but HMT was given parameters, not a module: "
                f'{first} cannot be patched. Legal here: "auto" or False. Or pass the module itself.'
            )
        if left := left_dense(assigned):
            warnings.warn(f"hmt: {left}", stacklevel=2)
        rounded = self.options["master_weights"] == "none"
        groups = {param: group for group in self.param_groups for param in group["params"]}
        for (_, param), assignment in zip(trainable, assigned, strict=True):
            if param in self._slots:
                continue
            seed, state_dtype = int(self.options["seed"]), str(self.options["state_dtype"])
            slot = Slot(
                param, assignment, seed, state_dtype, rounded, self.state[param], groups[param]
            )
            if slot.matrix is not None:
                self._bases.slots.append(slot)
            self._slots[param] = slot
        self._link()
        self._bases.extend(self._patches.shared)
        return True

    def _check_dtypes(self, trainable: Iterable[tuple[str, Tensor]]) -> None:
        for name, param in trainable:
            if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    f"{name} is {param.dtype}; legal: float32, bfloat16, float16. "
                    "Convert the parameter or freeze it."
                )
            if param.dtype == torch.float16 and self.options["master_weights"] == "none":
                raise ValueError(
                    f"hmt.optimizer.master_weights is 'none', but {name} is float16; stochastic "
                    "rounding is for bfloat16. Convert the weights or use 'fp32'."
                )

    def _patch(
        self,
        model: nn.Module,
        linears: Mapping[str, nn.Module],
        experts: Mapping[str, ExpertSite],
    ) -> None:
        """Projected backward for the low-rank linears and experts; undone by :meth:`close` or with this object."""
        wanted = self.options["projected_backward"]
        if wanted is False:
            return
        self._patches.install(
            model,
            linears,
            experts,
            [(slot.param, slot.matrix) for slot in self._bases.slots if slot.matrix is not None],
            required=wanted is True,
            encode=self.options["weight_dtype"] == "int8",
        )
        self._link()
        if self._patches.projected:
            ownership.claim(self)

    def _link(self) -> None:
        for slot in self._bases.slots:
            slot.linear = self._patches.projected.get(slot.param)
            slot.encoded = self._patches.encoded.get(slot.param)

    def close(self) -> None:
        """Give the modules their own backward and weights again. The optimizer goes on with ``p.grad``."""
        ownership.leave(self)
        self._patches.close()
        self._link()

    def owner_name(self) -> str:
        """See :class:`hmt_deepspeed.ownership.Owner`."""
        named = next(iter(self._named()), ("none", None))[0]
        return f"an earlier HMT optimizer (step {self._steps}, parameters from {named})"

    def owned(self) -> Iterable[Tensor]:
        """The weights of patched modules."""
        return list(self._patches.projected)

    def unfinished(self) -> str:
        """Projected gradients that no step has used."""
        waiting = any(linear.pending is not None for linear in self._patches.projected.values())
        return "it has accumulated gradients that no step has used" if waiting else ""

    def give_up(self, to: str) -> None:
        """As :meth:`close`, and no further step."""
        self.close()
        self._taken_by = to

    # -- a window of backwards ------------------------------------------------------------------

    def _prepare(self) -> None:
        self._bases.prepare(self._steps, self._patches.shared)
        self._stacked.make_room(list(self._slots.values()))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, the projected ones included."""
        self._patches.accumulated.drop()
        super().zero_grad(set_to_none)

    def _ready(self) -> None:
        """The accumulation window's gradients are complete: bases that are due are found, once per step.

        Raises:
            RuntimeError: the parameters have been taken over.
        """
        if self._taken_by is not None:
            raise RuntimeError(
                f"this HMT optimizer was taken apart when {self._taken_by} was built on its parameters: use that "
                "one, or build a new optimizer"
            )
        if self._build():
            self._prepare()
        for slot in self._slots.values():
            if slot.param.grad is not None and slot.param.grad.layout != torch.strided:
                raise ValueError(
                    f"{slot.name} has a {slot.param.grad.layout} gradient; legal: dense. "
                    "Build the embedding with sparse=False."
                )
        self._bases.find(self._steps)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the accumulated gradients to a global norm of at most ``max_norm``.

        The norm of a low-rank matrix is estimated from ``[A | S]`` as ``||A||^2 + ||S||^2 (n-r)/k``,
        whether its full gradient is there or not, so that both clip alike.

        Args:
            max_norm: > 0; infinity only measures.

        Returns:
            The norm before clipping, 0-dim fp32.

        Raises:
            ValueError: ``max_norm`` is not positive, or there are no probes to estimate a norm from.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm!r}; legal: > 0, infinity to measure only")
        if self.options["probes"] == 0:
            raise ValueError(
                "hmt.optimizer.probes is 0, so that the norm of what is outside the bases is unknown; "
                'legal where gradients are clipped: "auto" or an integer >= 1. To do: use "auto".'
            )
        self._ready()
        slots = list(self._slots.values())
        squares = self._stacked.square_norms(slots)
        if not squares:
            return torch.zeros(())
        norm = torch.stack([s.sum().to(squares[0].device) for s in squares]).sum().sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's clip_grad_norm_ adds the same
        for slot in slots:
            for gradient in slot.gradients():
                gradient.mul_(factor.to(gradient.device))
        before = self._patches.accumulated.clipped
        self._patches.accumulated.clipped = factor if before is None else before * factor
        return norm

    # -- step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step; parameters without a gradient are skipped.

        Args:
            closure: recomputes the loss and its gradients.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ready()
        factor = self._patches.accumulated.clipped
        slots = [self._slots[p] for g in self.param_groups for p in g["params"] if p in self._slots]
        self._stacked.take(slots, self._steps, 1.0 if factor is None else factor)
        self._steps, self._patches.accumulated.clipped = self._steps + 1, None
        self._prepare()
        return loss

    # -- table and checkpoint -------------------------------------------------------------------

    def describe(self) -> list[ParameterRow]:
        """Rule, reason, rank and bytes of states (masters included) of every trainable parameter."""
        if self._build():
            self._prepare()
        return [slot.describe() for slot in self._slots.values()]

    @property
    def matrices(self) -> dict[str, MatrixRule]:
        """The rule objects of all matrices, by parameter name."""
        return {slot.name: slot.matrix for slot in self._bases.slots if slot.matrix is not None}

    def state_dict(self) -> dict[str, Any]:
        """torch's layout with plain tensors and numbers, plus an "hmt" entry of what is shared."""
        packed = super().state_dict()
        for group in packed["param_groups"]:  # a NumPy schedule makes NumPy learning rates
            group.update({k: v.item() for k, v in group.items() if isinstance(v, np.generic)})
        packed["state"] = {index: dict(state) for index, state in packed["state"].items()}
        for index, (_, param) in enumerate(self._named()):
            slot = self._slots.get(param)
            if slot is None or (slot.matrix is None and slot.dense is None):
                continue
            state = packed["state"].setdefault(index, {})
            state.update(slot.state_dict())
            if slot.matrix is not None:
                state.update(self._bases.times(slot))
        packed["hmt"] = {
            "steps": self._steps,
            "names": [name for name, _ in self._named()],
            "groups": self._patches.shared.groups(),
            "settled": self._patches.shared.observed,
            "policy": self._bases.policy.state_dict(),
        }
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, bit for bit; the tensors are copied.

        Raises:
            ValueError: not a state of this class, or of other parameters or rules.
        """
        names = [name for name, _ in self._named()]
        own = state_dict.get("hmt")
        if own is None or own["names"] != names:
            found = "no 'hmt' entry" if own is None else f"parameters {own['names'][:3]}..."
            raise ValueError(
                f"the state dict has {found}, this optimizer {names[:3]}...: load a state of HMT, "
                "into an optimizer constructed from the same parameters in the same way"
            )
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._slots.clear()
        self._bases = BasisRefreshes(self.options)
        self._patches.shared.restore(own["groups"], own["settled"])
        self._steps = int(own["steps"])
        self._build()
        for index, (_, param) in enumerate(self._named()):
            saved = state_dict["state"].get(index)
            if saved and param in self._slots:
                slot = self._slots[param]
                slot.load_state_dict(saved)
                if slot.matrix is not None:
                    self._bases.set_times(slot, saved)
        self._bases.form_groups(self._patches.shared)
        self._bases.policy.load_state_dict(own["policy"])
        self.zero_grad()
        self._prepare()


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        raise ValueError(
            f"params is a {type(model).__name__}, which would not reduce projected gradients; legal: "
            "a plain module. Train through the DeepSpeed engine, or pass named_parameters()."
        )
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]

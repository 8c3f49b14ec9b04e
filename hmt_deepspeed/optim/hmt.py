"""The optimizer for use without DeepSpeed: rules, bases, schedule and projected backward composed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hmt_deepspeed import ownership
from hmt_deepspeed.config.full_gradients import auto_full_gradient_bytes
from hmt_deepspeed.optim.backward.int8_linear import release
from hmt_deepspeed.optim.backward.patches import Patches
from hmt_deepspeed.optim.decisions.policy import build_policy
from hmt_deepspeed.optim.decisions.refresh import refresh_bases
from hmt_deepspeed.optim.decisions.schedule import RefreshSchedule
from hmt_deepspeed.optim.decisions.sharing import regroup, share_bases
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.settings.assign import assign_rules, head_weights, linear_weights
from hmt_deepspeed.optim.settings.options import (
    check_group,
    complete_options,
    matrix_settings,
    module_rules,
)
from hmt_deepspeed.optim.slot import ParameterRow, Slot

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

    Without a ``scale`` it is GaLore's 0.25 at ten times ``lr``, embeddings, heads and vectors included; decay is not
    multiplied.

    Given a module, its low-rank linears get the projected backward: ``[A | S]`` comes out of backward
    and the weight gradient is formed only in the window before a basis refresh. Given tensors, groups
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
        self._low_rank: list[Slot] = []
        self._groups: list[list[int]] = []
        self._patches = Patches()
        self._schedule = RefreshSchedule((), 1, 0)
        self._policy = build_policy((), self.options)
        self._linear_names: set[str] | None = None
        self._head_names: set[str] = set()
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
            self._build()
            self._patch(model, linears)
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
        )
        first = next((a.name for a in assigned if a.low_rank), None)
        if self.options["projected_backward"] is True and not self._linear_names and first:
            raise ValueError(
                "hmt.optimizer.projected_backward is True, but HMT was given parameters, not a module: "
                f'{first} cannot be patched. Legal here: "auto" or False. Or pass the module itself.'
            )
        rounded = self.options["master_weights"] == "none"
        for (_, param), assignment in zip(trainable, assigned, strict=True):
            if param in self._slots:
                continue
            seed, state_dtype = int(self.options["seed"]), str(self.options["state_dtype"])
            slot = Slot(param, assignment, seed, state_dtype, rounded, self.state[param])
            if slot.matrix is not None:
                self._low_rank.append(slot)
            self._slots[param] = slot
        self._link()
        self._extend_schedule()
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

    def _extend_schedule(self) -> None:
        sizes = [slot.full_gradient_bytes for slot in self._low_rank]
        budget = self.options["max_full_gradient_bytes"]
        if budget == "auto":
            budget = auto_full_gradient_bytes(sizes)
        budget = cast(int, budget)
        largest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
        if largest is not None and budget < sizes[largest]:
            raise ValueError(
                f"hmt.optimizer.max_full_gradient_bytes is {budget}, but the gradient of "
                f"{self._low_rank[largest].name} has {sizes[largest]} bytes; legal: at least that. "
                'Raise it, use "auto", or leave the module to adamw in module_rules.'
            )
        old, interval = self._schedule, int(self.options["update_interval"])
        new = self._schedule = RefreshSchedule(sizes, interval, budget)
        new.take_times(old)
        self._form_groups()

    def _form_groups(self) -> None:
        """Matrices that take one basis together, by place; each alone unless bases are shared."""
        matrices = [cast(MatrixRule, slot.matrix) for slot in self._low_rank]
        readers = self._patches.shared.groups() if self.options["share_basis"] else []
        fixed = self.options["max_full_gradient_bytes"] != "auto"
        self._schedule = regroup(self._schedule, matrices, readers, fixed, warnings.warn)
        self._groups = self._schedule.groups
        members = [[matrices[i] for i in group] for group in self._groups]
        share_bases(members)
        known = self._policy.state_dict()
        self._policy = build_policy(members, self.options)
        self._policy.load_state_dict(known)

    def _patch(self, model: nn.Module, linears: Mapping[str, nn.Module]) -> None:
        """Projected backward for the low-rank linears; undone by :meth:`close` or with this object."""
        wanted = self.options["projected_backward"]
        if wanted is False:
            return
        self._patches.install(
            model,
            linears,
            [(slot.param, slot.matrix) for slot in self._low_rank if slot.matrix is not None],
            required=wanted is True,
            encode=self.options["weight_dtype"] == "int8",
        )
        self._link()
        if self._patches.sites:
            ownership.claim(self)

    def _link(self) -> None:
        for slot in self._low_rank:
            slot.site = self._patches.sites.get(slot.param)
            slot.encoded = self._patches.encoded.get(slot.param)

    def close(self) -> None:
        """Give the linears their own backward and weights again. The optimizer goes on with ``p.grad``."""
        ownership.leave(self)
        self._patches.close()
        self._link()

    def owner_name(self) -> str:
        """See :class:`hmt_deepspeed.ownership.Owner`."""
        named = next(iter(self._named()), ("none", None))[0]
        return f"an earlier HMT optimizer (step {self._steps}, parameters from {named})"

    def owned(self) -> Iterable[Tensor]:
        """The weights of patched linears."""
        return list(self._patches.sites)

    def unfinished(self) -> str:
        """Projected gradients that no step has used."""
        waiting = any(site.pending is not None for site in self._patches.sites.values())
        return "it has accumulated gradients that no step has used" if waiting else ""

    def give_up(self, to: str) -> None:
        """As :meth:`close`, and no further step."""
        self.close()
        self._taken_by = to

    # -- a window of backwards ------------------------------------------------------------------

    def _prepare(self) -> None:
        """Decide who refreshes in the coming step and what the others' backward projects on."""
        due: set[int] = set()
        if self.options["share_basis"] and not self._patches.shared.settled:
            self._patches.shared.settle()  # the first window only observes who reads the same input
            if self._patches.shared.settled:
                self._form_groups()
        if not self.options["share_basis"] or self._patches.shared.settled:
            due.update(self._schedule.due(self._steps))
        for index, slot in enumerate(self._low_rank):
            matrix = slot.matrix
            if index in due and matrix is not None and matrix.redraws:
                due.discard(index)
                slot.redraw(self._schedule.num_refreshes[index])
                self._schedule.refreshed(index, self._steps)
            slot.prepare(self._steps, index in due)
        self._patches.shared.lay_out()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, the projected ones included."""
        self._patches.accumulated.drop()
        super().zero_grad(set_to_none)

    def _ready(self) -> None:
        """The window's gradients are complete: bases that are due are found, once per step.

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
        due = {
            index: [self._low_rank[member] for member in group]
            for index, group in enumerate(self._groups)
            if self._low_rank[group[0]].due
        }
        refreshed = refresh_bases(due, self._policy, self._steps)
        for index in due:
            if index in refreshed:
                for member in self._groups[index]:
                    self._schedule.refreshed(member, self._steps)
            else:
                self._schedule.postpone(self._groups[index][0], self._steps)

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
        slots = self._slots.values()
        squares = [s for s in (slot.square_norm() for slot in slots) if s is not None]
        if not squares:
            return torch.zeros(())
        norm = torch.stack([s.to(squares[0].device) for s in squares]).sum().sqrt()
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
        for group in self.param_groups:
            for param in group["params"]:
                if param in self._slots:
                    clipped = 1.0 if factor is None else factor.to(param.device)
                    self._slots[param].step(group, self._steps, clipped)
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
        return {slot.name: slot.matrix for slot in self._low_rank if slot.matrix is not None}

    def state_dict(self) -> dict[str, Any]:
        """torch's layout with plain tensors and numbers, plus an "hmt" entry of what is shared."""
        packed = super().state_dict()
        for group in packed["param_groups"]:  # a NumPy schedule makes NumPy learning rates
            group.update({k: v.item() for k, v in group.items() if isinstance(v, np.generic)})
        packed["state"] = {index: dict(state) for index, state in packed["state"].items()}
        position = {slot.param: i for i, slot in enumerate(self._low_rank)}
        for index, (_, param) in enumerate(self._named()):
            slot = self._slots.get(param)
            if slot is None or (slot.matrix is None and slot.dense is None):
                continue
            state = packed["state"].setdefault(index, {})
            state.update(slot.state_dict())
            if slot.matrix is not None:
                state["next_refresh"] = self._schedule.next_refresh[position[param]]
                state["num_refreshes"] = self._schedule.num_refreshes[position[param]]
        packed["hmt"] = {
            "steps": self._steps,
            "names": [name for name, _ in self._named()],
            "groups": self._patches.shared.groups(),
            "settled": self._patches.shared.settled,
            "policy": self._policy.state_dict(),
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
        self._low_rank.clear()
        self._schedule = RefreshSchedule((), 1, 0)
        self._policy = build_policy((), self.options)
        self._patches.shared.restore(own["groups"], own["settled"])
        self._steps = int(own["steps"])
        self._build()
        for index, (_, param) in enumerate(self._named()):
            saved = state_dict["state"].get(index)
            if saved and param in self._slots:
                slot = self._slots[param]
                slot.load_state_dict(saved)
                if slot.matrix is not None:
                    position = self._low_rank.index(slot)
                    self._schedule.next_refresh[position] = int(saved["next_refresh"])
                    self._schedule.num_refreshes[position] = int(saved["num_refreshes"])
        self._form_groups()
        self._policy.load_state_dict(own["policy"])
        self.zero_grad()
        self._prepare()


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    if type(model).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
        raise ValueError(
            f"params is a {type(model).__name__}, which would not reduce projected gradients; legal: "
            "a plain module. Train through the DeepSpeed engine, or pass named_parameters()."
        )
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]

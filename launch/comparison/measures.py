"""What a contender holds and has seen: state bytes by kind, ranks, captured energy, memory, PCIe bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comparison.contenders import Contender, expert_names
from hmt_deepspeed.optim.backward.linear import can_project
from hmt_deepspeed.optim.hmt import HMT
from hmt_deepspeed.optim.rules.matrix import MatrixRule
from hmt_deepspeed.optim.rules.projected import ProjectedMatrix
from hmt_deepspeed.report.metrics import host_bytes, peak_host_bytes

ADAMW_MOMENT_BYTES = 8  # two fp32 moments per element
# Of bitsandbytes with the scales of their blocks, of Adam-mini, of Muon.
MOMENTS = frozenset(
    {"state1", "state2", "absmax1", "absmax2", "m", "v", "vmean", "momentum_buffer"}
)
BASES = frozenset({"basis", "Q", "GG"})  # SOAP's with what they are made from


def states_by_name(contender: Contender) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(parameter name, its optimizer state) of every trained parameter that has one."""
    optimizer = contender.optimizer
    if isinstance(optimizer, HMT):
        packed = optimizer.state_dict()
        for index, name in enumerate(packed["hmt"]["names"]):
            yield name, packed["state"].get(index, {})
        return
    for name, param in contender.model.named_parameters():
        if param in optimizer.state:
            yield name, optimizer.state[param]


def _tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one state with their keys; a peer's projector object holds its basis, SOAP lists of two."""
    for key, value in state.items():
        basis = getattr(value, "ortho_matrix", None)
        if basis is not None:
            yield "basis", basis
        elif isinstance(value, Tensor):
            yield key, value
        elif isinstance(value, list):
            yield from ((key, own) for own in value if isinstance(own, Tensor))


def _kind(key: str) -> str:
    """What a state of a matrix is, by its key in the peer's own words."""
    if key.startswith("exp_avg") or key in MOMENTS:
        return "matrices_moments"
    return "matrices_bases" if key in BASES else "matrices_other"


def state_bytes(contender: Contender) -> dict[str, Any]:
    """Bytes of optimizer state, measured from the tensors, once a step has been taken.

    Returns:
        matrices_moments, matrices_bases, matrices_other, dense (all states of the other parameters;
        of adapters all is dense), total, and shares of AdamW's moment bytes on the matrices, of a mixture also of
        those on its experts alone. HMT's probe columns are drawn anew every step and are no state.
    """
    sizes = dict.fromkeys(("matrices_moments", "matrices_bases", "matrices_other", "dense"), 0)
    matrices, experts = set(contender.matrices), set(expert_names(contender.model))
    sizes |= {"experts_moments": 0} if experts else {}
    if isinstance(contender.optimizer, HMT):
        sizes |= _hmt_bytes(contender.optimizer, matrices)
        if experts:
            sizes["experts_moments"] = _hmt_bytes(contender.optimizer, experts)["matrices_moments"]
        return _with_shares(contender, sizes)
    for name, state in states_by_name(contender):
        for key, tensor in _tensors(state):
            kind = _kind(key) if name in matrices else "dense"
            sizes[kind] += tensor.numel() * tensor.element_size()
            if name in experts and kind == "matrices_moments":
                sizes["experts_moments"] += tensor.numel() * tensor.element_size()
    return _with_shares(contender, sizes)


def _hmt_bytes(optimizer: HMT, names: set[str]) -> dict[str, int]:
    """As stored: 8- and 16-bit moments, a shared basis once, nothing of one that is redrawn."""
    matrices = [matrix for name, matrix in optimizer.matrices.items() if name in names]
    moments = sum(state.nbytes for matrix in matrices for state in matrix.states().values())
    evidence = sum(matrix.moments.nbytes for matrix in matrices) - moments
    total = sum(matrix.state_bytes() for matrix in matrices)
    held = {row.name: row.state_bytes for row in optimizer.describe()}
    own = {matrix.name for matrix in matrices}
    return {
        "matrices_moments": moments,
        "matrices_bases": total - moments - evidence,
        "matrices_other": evidence,
        "dense": sum(size for name, size in held.items() if name not in own),
    }


def _with_shares(contender: Contender, sizes: Mapping[str, int]) -> dict[str, Any]:
    full = ADAMW_MOMENT_BYTES * elements(contender, contender.matrices)
    of_experts = ADAMW_MOMENT_BYTES * elements(contender, expert_names(contender.model))
    shares = {"experts_moments_share": sizes["experts_moments"] / of_experts} if of_experts else {}
    return {
        **sizes,
        **shares,
        "total": sum(size for kind, size in sizes.items() if kind != "experts_moments"),
        "adamw_moments_on_matrices": full,
        "moments_share": sizes["matrices_moments"] / full if full else None,
        "moments_and_bases_share": (sizes["matrices_moments"] + sizes["matrices_bases"]) / full
        if full
        else None,
    }


def elements(contender: Contender, names: Iterable[str]) -> int:
    wanted = set(names)
    return sum(p.numel() for name, p in contender.model.named_parameters() if name in wanted)


def ranks(contender: Contender) -> dict[str, int]:
    """Rank in force of every low-rank matrix; empty for a method without any."""
    optimizer = contender.optimizer
    if isinstance(optimizer, HMT):
        return {row.name: row.rank for row in optimizer.describe() if row.rank is not None}
    found = {}
    for name, state in states_by_name(contender):
        for key, tensor in _tensors(state):
            if key == "basis":
                found[name] = min(tensor.shape)
    return found


def captured_energy(contender: Contender) -> dict[str, float]:
    """Share of each matrix gradient's squared norm inside its basis; empty where there is no such share.

    Of HMT its own running estimate, where it has one; of methods with an orthonormal basis and whole
    gradients it is computed. APOLLO's random projection is no orthogonal one.
    """
    if isinstance(contender.optimizer, HMT):
        return {
            name: float(matrix.smoothed_energy())
            for name, matrix in contender.optimizer.matrices.items()
            if isinstance(matrix, ProjectedMatrix)
            and matrix.measures_energy
            and matrix.energy_weight
        }
    gradients = dict(contender.model.named_parameters())
    found = {}
    for name, state in states_by_name(contender):
        gradient = gradients[name].grad
        for key, basis in _tensors(state):
            if key == "basis" and gradient is not None and _is_orthonormal(basis):
                found[name] = _share(gradient, basis)
    return found


def without_activation_error(contender: Contender) -> dict[str, str]:
    """For each matrix, why 1 - captured energy is not what saving its input projected loses.

    "" where it is: `X [Q | P]` is saved in place of the input `X`, and the energy is that of `G Q`.
    """
    optimizer = contender.optimizer
    if not isinstance(optimizer, HMT):
        return dict.fromkeys(contender.matrices, "the input is saved as it is: another optimizer")
    modules = {name: name.rpartition(".")[0] for name in optimizer.matrices}
    return {
        name: _why_without(matrix, contender.model.get_submodule(modules[name]))
        for name, matrix in optimizer.matrices.items()
    }


def _why_without(matrix: MatrixRule, module: nn.Module) -> str:
    if matrix.takes_whole:
        return "the input is saved as it is: the rule takes whole gradients"
    if matrix.transposed:
        return "the input is saved as it is: the weight is projected from the left"
    # A patched module has HMT's forward in its own dictionary; of a linear `can_project` knows it from others.
    if "forward" not in vars(module) or (matrix.count == 1 and not can_project(module)):
        return "the input is saved as it is: no projected backward"
    if matrix.settings.rule.gradient == "core":
        return "the captured energy is the core's, which also lacks rows"
    return ""


def _columns(basis: Tensor) -> Tensor:
    """The basis as tall columns: galore_torch stores a right one as rows."""
    return basis if basis.shape[0] >= basis.shape[1] else basis.t()


def _is_orthonormal(basis: Tensor) -> bool:
    columns = _columns(basis).float()
    gram = columns.t() @ columns
    return bool(torch.allclose(gram, torch.eye(len(gram), device=gram.device), atol=1e-2))


def _share(gradient: Tensor, basis: Tensor) -> float:
    columns = _columns(basis)
    side = gradient if gradient.shape[1] == len(columns) else gradient.t()
    whole = float(side.square().sum())
    return float((side @ columns).square().sum()) / whole if whole else 0.0


class Memory:
    """Peak and average bytes while training: CUDA's allocator, or this process's resident bytes.

    A cell has a process of its own, so that the peak is the cell's. `start` is read when model and
    optimizer stand and nothing has been trained: it holds weights, text and libraries (some peers
    import more of them). The numbers are kept in a checkpoint.
    """

    def __init__(self, device: str, kept: Mapping[str, int] | None = None) -> None:
        self.cuda = device == "cuda"
        first = {"start": self._now(), "peak": 0, "host_peak": 0, "sum": 0, "samples": 0}
        self.kept = dict(kept or first)

    def _now(self) -> int:
        return int(torch.cuda.memory_allocated()) if self.cuda else host_bytes()

    def sample(self) -> None:
        """Count what is held now in the average."""
        self.kept["sum"] += self._now()
        self.kept["samples"] += 1

    def read_peaks(self) -> None:
        """The process's peaks so far; once a step is enough."""
        host = peak_host_bytes()
        peak = int(torch.cuda.max_memory_allocated()) if self.cuda else host
        self.kept["peak"] = max(self.kept["peak"], peak)
        self.kept["host_peak"] = max(self.kept["host_peak"], host)

    def record(self) -> dict[str, Any]:
        return {
            "device_memory": "cuda allocator" if self.cuda else "cpu (process RSS)",
            "start_device_bytes": self.kept["start"],
            "peak_device_bytes": self.kept["peak"],
            "average_device_bytes": self.kept["sum"] / max(self.kept["samples"], 1),
            "device_samples": self.kept["samples"],
            "peak_host_bytes": self.kept["host_peak"],
        }


class Pcie:
    """Bytes that the loop copies between host and device; scalars that the optimizers read are not counted."""

    def __init__(self, device: str, count: int = 0) -> None:
        self.device, self.count = device, count

    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.device == "cuda":
            self.count += sum(t.numel() * t.element_size() for t in batch.values())
        return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}

    def read(self, value: Tensor) -> float:
        """A number off the device."""
        if self.device == "cuda":
            self.count += value.element_size()
        return float(value)

    def record(self) -> dict[str, Any]:
        if self.device == "cuda":
            return {"pcie_bytes": self.count}
        return {"pcie_bytes": None, "pcie_reason": "trained on the CPU: nothing crosses PCIe"}


@contextlib.contextmanager
def arithmetic(device: str, dtype: str) -> Iterator[None]:
    """bf16 under autocast, or as the weights are (fp32)."""
    if dtype == "fp32":
        yield
        return
    with torch.autocast(device, dtype=torch.bfloat16):
        yield

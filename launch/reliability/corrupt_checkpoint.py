"""Damaged checkpoints: the damage is found and said, the one before it is loaded, never the damaged one."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from reliability.features import config
from reliability.processes import run_worker
from reliability.results import CaseReport

__all__ = ["run_case"]

_DAMAGES = ("flipped bit", "cut off", "512 bytes inverted", "missing file", "empty file")
_FEATURES = ("ZeRO-0", "ZeRO-2", "ZeRO-3", "INT8 weights")


def run_case(seed: int, small: bool) -> CaseReport:
    """A random file of the newer of two checkpoints is damaged, then both are offered."""
    draw, number = random.Random(seed), 2 if small else 25
    features = _FEATURES[1:2] if small else _FEATURES
    report = CaseReport("a random file of the newer of two checkpoints is damaged")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for feature in features:
            _one(feature, number, draw, folder, report)
    return report


def _one(feature: str, number: int, draw: random.Random, folder: Path, report: CaseReport) -> None:
    whole = folder / feature.replace(" ", "-")
    base = {"config": config(feature), "feature": feature}
    saved = run_worker([{**base, "steps": 4, "save_every": 2, "checkpoints": str(whole)}], folder)
    if "error" in saved[0]:
        report.failures.append(f"{feature}: {saved[0]['error']}")
        return
    orders, damages = [], []
    for index in range(number):
        copy = folder / f"{whole.name}-{index}"
        shutil.copytree(whole, copy)
        damages.append(_damage(draw, copy / "global_step4"))
        orders.append({**base, "steps": 0, "load": str(copy)})
    for damage, found in zip(damages, run_worker(orders, folder), strict=True):
        name = f"{feature}, {damage}"
        if found.get("loaded_step") == 2 and "global_step4" in found["said"]:
            report.count("found, said, the one before loaded")
        else:
            report.failures.append(f"{name}: {found}")
            report.count("not found")
    for order in orders:
        shutil.rmtree(order["load"])


def _damage(draw: random.Random, checkpoint: Path) -> str:
    """Damage one file that loading reads; which and how, in words."""
    files = [p for p in sorted(checkpoint.iterdir()) if p.suffix in (".pt", ".json")]
    path, kind = draw.choice(files), draw.choice(_DAMAGES)
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    if kind == "flipped bit":
        content[at] ^= 1 << draw.randrange(8)
    elif kind == "cut off":
        del content[at:]
    elif kind == "512 bytes inverted":
        length = min(512, len(content) - at)
        content[at : at + length] = bytes(b ^ 255 for b in content[at : at + length])
    elif kind == "empty file":
        content.clear()
    if kind == "missing file":
        path.unlink()
    else:
        path.write_bytes(bytes(content))
    return f"{kind} in {path.name} at {at}"

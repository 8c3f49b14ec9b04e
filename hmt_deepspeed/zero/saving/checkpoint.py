"""Checkpoints: states by parameter name as plain tensors, loadable at any world size and ZeRO stage.

A checkpoint is DeepSpeed's folder with DeepSpeed's file names, plus ``manifest.json`` with the size and
checksum of every file. It is written as ``TAG.saving`` and renamed when it is complete, so a tag that
exists is whole; ``latest`` is replaced atomically afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from hmt_deepspeed.memory.errors import StoreError
from hmt_deepspeed.zero.interfaces import Engine
from hmt_deepspeed.zero.saving.client_objects import plain_numbers, storable
from hmt_deepspeed.zero.saving.durable import (
    MANIFEST,
    make_folder,
    replace_text,
    sync_folder,
)
from hmt_deepspeed.zero.saving.optimizer_state import FORMAT
from hmt_deepspeed.zero.saving.saved_state import SavedState
from hmt_deepspeed.zero.saving.ssd_files import save_files
from hmt_deepspeed.zero.saving.universal import REFUSALS
from hmt_deepspeed.zero.saving.verify import candidate_tags, damage
from hmt_deepspeed.zero.sharding.shards import whole_shape
from hmt_deepspeed.zero.state import ZeroState
from hmt_deepspeed.zero.weights.int8_weight import EncodedWeight
from hmt_deepspeed.zero.weights.residency import resident

__all__ = [
    "check_folder",
    "commit",
    "common_state",
    "load",
    "prepare",
    "saving_tag",
]


# -- saving ---------------------------------------------------------------------------------------


def check_folder(name: str, value: Any) -> None:
    """Check a folder's name before any rank waits for another: it is wrong on every rank alike.

    Raises:
        ValueError: None or an empty name of the folder that ``save_checkpoint`` or ``load_checkpoint`` was given.
    """
    if not value:
        raise ValueError(f"{name} is {value!r}: legal is the path of a folder. Give one.")


def common_state(engine: Engine, module: dict[str, Any], save_frozen: bool) -> dict[str, Any]:
    """DeepSpeed's state beside the optimizer's, in plain types, without keys that are None.

    Args:
        module: weights and buffers by name. save_frozen: whether frozen weights go in too.
    """
    state = DeepSpeedEngine._common_checkpoint_state(engine, module, True, save_frozen)
    weights = ("module", FROZEN_PARAM_FRAGMENTS)
    return {
        key: value if key in weights else storable(plain_numbers(value))
        for key, value in state.items()
        if value is not None  # the loader asks whether it is there
    }


def saving_tag(tag: str) -> str:
    """Name of a checkpoint's folder while it is being written."""
    return f"{tag}.saving"


def prepare(engine: Engine, save_dir: str, tag: str) -> None:
    """Remove what an earlier, killed save of the same tag left behind."""
    engine.checkpoint_engine.begin()
    if _is_writer(engine):
        shutil.rmtree(os.path.join(save_dir, saving_tag(tag)), ignore_errors=True)
        with engine.checkpoint_engine.remembering(save_dir):
            make_folder(save_dir)
    dist.barrier()


def commit(engine: Engine, save_dir: str, tag: str, save_latest: bool) -> int:
    """Link what is on an SSD, write the manifest, give the folder its name, point ``latest`` at it.

    Two phases: the folder gets its name after every rank has said that its part is on the disk.

    Args:
        engine: whose checkpoint it is. save_dir: folder of all checkpoints. tag: of this one.
        save_latest: whether ``latest`` is to name it.

    Returns:
        bytes of all ranks' files.

    Raises:
        OSError: on every rank, when one could not write its files; what was saved before is untouched.
    """
    folder = os.path.join(save_dir, saving_tag(tag))
    mine, problem = dict(engine.checkpoint_engine.checksums), engine.checkpoint_engine.failure
    try:
        if problem is None:
            mine |= save_files(engine.optimizer.zero, folder)
    except (StoreError, OSError) as error:
        problem = str(error)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (mine, problem))
    failures = [f"rank {r}: {why}" for r, (_, why) in enumerate(gathered) if why is not None]
    failure = "; ".join(failures)
    files = {name: entry for part, _ in gathered for name, entry in part.items()}
    if _is_writer(engine):
        try:
            if not failure:
                _publish(engine, save_dir, tag, files, save_latest)
        except OSError as error:
            failure = f"rank {dist.get_rank()}: {error}"
        if failure:
            shutil.rmtree(folder, ignore_errors=True)
    dist.all_gather_object(gathered, failure)
    failure = next((why for why in gathered if why), "")
    if failure:
        raise OSError(
            f"checkpoint {tag!r} was not saved: {failure}. Earlier checkpoints in {save_dir} are untouched: "
            "mend that (make room) and save again."
        )
    return sum(entry["bytes"] for entry in files.values())


def _publish(
    engine: Engine, save_dir: str, tag: str, files: dict[str, Any], save_latest: bool
) -> None:
    folder, final = os.path.join(save_dir, saving_tag(tag)), os.path.join(save_dir, tag)
    present = {
        name: files[name] for name in sorted(files) if os.path.exists(os.path.join(folder, name))
    }
    manifest = {"format": FORMAT, "global_steps": engine.global_steps, "files": present}
    replace_text(os.path.join(folder, MANIFEST), json.dumps(manifest, indent=1))
    sync_folder(folder)
    old = f"{final}.old"
    shutil.rmtree(old, ignore_errors=True)
    if os.path.isdir(final):
        os.rename(final, old)
    os.rename(folder, final)
    sync_folder(save_dir)
    shutil.rmtree(old, ignore_errors=True)
    if save_latest:
        replace_text(os.path.join(save_dir, "latest"), tag)


def _is_writer(engine: Engine) -> bool:
    """One process per file system does the renaming."""
    return bool((engine.local_rank if engine.use_node_local_storage() else engine.global_rank) == 0)


# -- loading --------------------------------------------------------------------------------------


def load(
    engine: Engine,
    load_dir: str,
    tag: str | None,
    *,
    optimizer_states: bool,
    lr_scheduler: bool,
    module_only: bool,
    strict: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """Load weights, and what else is asked for, into an engine of any world size and stage.

    Without a tag the newest whole checkpoint is used: a damaged one is named and passed over.

    Args:
        engine: to load into. load_dir: folder of all checkpoints. tag: of one, or None.
        optimizer_states, lr_scheduler: load these too. module_only: load the weights alone, also of a stock checkpoint.
        strict: refuse a checkpoint that lacks weights of frozen parameters.

    Returns:
        ``(path of the checkpoint, client state)``, or ``(None, None)`` when there is none.

    Raises:
        ValueError: a damaged checkpoint asked for by its tag, or one of another model.
    """
    chosen = _choose(engine, load_dir, tag)
    if chosen is None:
        logger.warning(f"no checkpoint found under {load_dir}; nothing was loaded")
        return None, None
    folder = os.path.join(load_dir, chosen)
    if not SavedState.is_ours(folder):
        if not module_only:
            raise ValueError(
                f"{folder} was not written with HMT: it has no low-rank states. Load its weights with "
                "load_module_only=True."
            )
        return _load_stock_weights(engine, load_dir, chosen, strict)
    saved = SavedState(folder)
    engine.optimizer.checkpoint_event_prologue()
    _restore_weights(engine, saved, strict)
    if optimizer_states:
        engine.optimizer.load_saved(saved)
    engine.optimizer.checkpoint_event_epilogue()
    client_state = _load_the_rest(engine, load_dir, chosen, saved, lr_scheduler, module_only)
    dist.barrier()
    return folder, client_state


def _load_the_rest(
    engine: Engine,
    load_dir: str,
    tag: str,
    saved: SavedState,
    lr_scheduler: bool,
    module_only: bool,
) -> dict[str, Any]:
    """Schedulers, samplers and counters, by DeepSpeed's own loader, so that it restores here what it restores there.

    Returns:
        what DeepSpeed returns as client state: everything that is not its own.
    """
    if module_only:  # stock would make the masters anew, from weights of 16 bits
        state = engine.checkpoint_engine.load(*engine._get_all_ckpt_names(load_dir, tag))
        client_state = {key: value for key, value in state.items() if key != "module"}
    else:
        _, client_state = DeepSpeedEngine._load_checkpoint(
            engine,
            load_dir,
            tag,
            load_lr_scheduler_states=lr_scheduler and "lr_scheduler" in saved.model_state,
            custom_load_fn=lambda src, dst: None,  # the weights are there
        )
    return {key: value for key, value in client_state.items() if key not in REFUSALS}


def _choose(engine: Engine, load_dir: str, tag: str | None) -> str | None:
    """The tag to load: verified by one process per file system, the same on all ranks."""
    found: list[Any] = [None, None]  # the tag, and what is wrong
    if engine.global_rank == 0:
        try:
            found[0] = _newest_whole(load_dir, tag)
        except (ValueError, OSError) as error:
            found[1] = str(error)
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise ValueError(found[1])
    chosen: str | None = found[0]
    return chosen


def _newest_whole(load_dir: str, tag: str | None) -> str | None:
    for candidate in candidate_tags(load_dir, tag):
        problem = damage(os.path.join(load_dir, candidate))
        if problem is None:
            return candidate
        if tag is not None:
            raise ValueError(f"checkpoint {tag!r} under {load_dir} cannot be loaded: {problem}")
        print(
            f"hmt: checkpoint {candidate!r} is damaged ({problem}); trying the one before",
            flush=True,
        )
    if tag is not None:
        raise ValueError(
            f"no checkpoint {tag!r} under {load_dir}; found {candidate_tags(load_dir, None)}"
        )
    return None


def _restore_weights(engine: Engine, saved: SavedState, strict: bool) -> None:
    zero: ZeroState = engine.optimizer.zero
    saved.check_same_model(
        {
            name: whole_shape(p.gradient.param)
            for p in zero.param_states
            for name in zero.parallel_experts.everywhere(p.name)
        }
    )
    for param_state in zero.param_states:
        codes = saved.int8_weight(param_state.name)
        if isinstance(param_state.weight, EncodedWeight) and codes is not None:
            param_state.weight.load_state_dict(codes)
        else:
            param_state.weight.set_whole(saved.master(param_state.name))
    trained = {id(p.gradient.param) for p in zero.param_states}
    with torch.no_grad():
        for param, name in zero.param_names.items():
            if id(param) in trained or not (strict or saved.holds_frozen(name)):
                continue
            flat = saved.frozen(name).reshape(-1)
            if hasattr(param, "ds_tensor"):
                part = param.ds_tensor.ds_numel
                begin = part * zero.collectives.rank
                piece = flat[begin : begin + part]
                with resident(param, overwrite=True) as held:
                    held[: piece.numel()].copy_(piece)
            else:
                param.data.copy_(flat.view(param.shape))
        for name, buffer in engine.module.named_buffers():
            if name in saved.model_state["module"]:
                buffer.copy_(saved.model_state["module"][name])


def _load_stock_weights(
    engine: Engine, load_dir: str, tag: str, strict: bool
) -> tuple[str, dict[str, Any]]:
    """Weights of a checkpoint that stock DeepSpeed wrote, by DeepSpeed's own consolidation."""
    weights = get_fp32_state_dict_from_zero_checkpoint(load_dir, tag)
    optimizer = engine.optimizer
    zero: ZeroState = optimizer.zero
    missing = [p.name for p in zero.param_states if p.name not in weights]
    if strict and missing:
        raise ValueError(f"checkpoint {tag!r} under {load_dir} has no weights for {missing[:5]}")
    optimizer.checkpoint_event_prologue()
    for param_state in zero.param_states:
        if param_state.name in weights:
            optimizer.state_access.set_full_hp_param(
                weights[param_state.name], param_state.gradient.param
            )
    optimizer.checkpoint_event_epilogue()
    return os.path.join(load_dir, tag), {}

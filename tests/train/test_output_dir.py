"""Which folder a run gets, and which runs are refused one."""

from pathlib import Path

import pytest

from hmt_deepspeed.train.finish import choose_output_dir


def test_a_new_run_gets_the_next_folder_and_a_resumed_one_the_newest(tmp_path: Path) -> None:
    default = str(tmp_path / "run")
    assert choose_output_dir(None, default, resume=False) == Path(default)
    for name in ("run", "run-2"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
        (tmp_path / name / "checkpoints" / "latest").touch()
    assert choose_output_dir(None, default, resume=False) == Path(f"{default}-3")
    assert choose_output_dir(None, default, resume=True) == Path(f"{default}-2")
    with pytest.raises(ValueError, match="holds a run with checkpoints"):
        choose_output_dir(default, "", resume=False)


def test_a_run_that_has_snapshots_and_no_checkpoint_yet_is_resumed(tmp_path: Path) -> None:
    run, snapshots = str(tmp_path / "run"), tmp_path / "snapshots"
    with pytest.raises(ValueError, match=f"no checkpoint in {run}/checkpoints; "):
        choose_output_dir(run, "", resume=True)
    snapshots.mkdir()
    (snapshots / "step00000004.saving").mkdir()  # torn, so nothing to resume from
    with pytest.raises(ValueError, match=f"no checkpoint in {run}/checkpoints or {snapshots}; "):
        choose_output_dir(run, "", resume=True, snapshots=str(snapshots))
    assert choose_output_dir(run, "", resume=False, snapshots=str(snapshots)) == Path(run)
    (snapshots / "step00000002").mkdir()
    assert choose_output_dir(run, "", resume=True, snapshots=str(snapshots)) == Path(run)


def test_a_new_run_is_refused_among_the_snapshots_of_another(tmp_path: Path) -> None:
    (tmp_path / "step00000200").mkdir()
    with pytest.raises(ValueError, match=r"hmt\.snapshot\.path is .* snapshots of another run"):
        choose_output_dir(str(tmp_path / "run"), "", resume=False, snapshots=str(tmp_path))

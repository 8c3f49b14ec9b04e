"""Keys and shape of the "hmt" block: what is misspelt, misplaced or no object, and what the refusal says."""

import pytest
from blocks import DEFAULTS, problems_of

from hmt_deepspeed.config import HMTConfig
from hmt_deepspeed.config.removed import REMOVED

# --- misspelt and misplaced keys --------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "path", "suggestion"),
    [
        ({"optimizer": {"energy_treshold": 0.9}}, "energy_treshold", "energy_threshold"),
        ({"optimizer": {"energy_treshold": 0.9}}, "energy_treshold", "got 0.9."),
        ({"optimizer": {"Rank": 8}}, "Rank", '"hmt.optimizer.rank"'),
        ({"optimizer": {"update-interval": 8}}, "update-interval", '"hmt.optimizer.update_int'),
        ({"optimizer": {"TARGET_MODULES": []}}, "TARGET_MODULES", '"hmt.optimizer.target_mod'),
    ],
)
def test_misspelt_key_gets_the_nearest_legal_key(block, path, suggestion):
    text = problems_of(block)[f"hmt.optimizer.{path}"]
    assert "did you mean" in text
    assert suggestion in text


def test_misspelt_section():
    text = problems_of({"optimiser": {"rank": 8}})["hmt.optimiser"]
    assert 'did you mean "hmt.optimizer"?' in text


def test_key_one_level_too_high_is_sent_to_its_place():
    assert problems_of({"rank": 8}) == {
        "hmt.rank": 'got 8. Unknown key here: it belongs at "hmt.optimizer.rank". Move it there.'
    }


def test_unlike_any_key_gets_all_legal_keys():
    text = problems_of({"optimizer": {"zzz": 1}})["hmt.optimizer.zzz"]
    assert f"Legal: {', '.join(DEFAULTS)}." in text


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_says_what_to_do_now(key):
    _, *sections, name = key.split(".")
    block = {name: 1}
    for section in reversed(sections):
        block = {section: block}
    assert problems_of(block) == {key: f"got 1. This key was removed: {REMOVED[key]}"}


def test_key_that_is_no_string():
    assert "hmt.optimizer.7" in problems_of({"optimizer": {7: 1}})


# --- shape of the block -----------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, [], "auto", 3, True])
def test_block_must_be_an_object(block):
    with pytest.raises(ValueError) as caught:
        HMTConfig.from_block(block)
    assert f'"hmt" key of the DeepSpeed config: got {block!r}. Legal: an object' in str(
        caught.value
    )


@pytest.mark.parametrize("section", [None, [], "adamw", 3, True])
def test_section_must_be_an_object(section):
    text = problems_of({"optimizer": section})["hmt.optimizer"]
    assert text.startswith(f"got {section!r}. Legal: an object.")


def test_every_problem_is_listed_at_once():
    problems = problems_of(
        {
            "optimiser": {},
            "optimizer": {
                "energy_threshold": 2,
                "probs": 4,
                "target_modules": ["(", "ok", "["],
                "residual": "full",
                "probes": 4,
            },
        }
    )
    assert set(problems) == {
        "hmt.optimiser",
        "hmt.optimizer.energy_threshold",
        "hmt.optimizer.probs",
        "hmt.optimizer.target_modules[0]",
        "hmt.optimizer.target_modules[2]",
        "hmt.optimizer.probes",
    }

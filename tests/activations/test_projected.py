"""The backend and projected backward: X [Q | P] is held, never X, and never computed again."""

from functools import cache

import pytest
import torch
from backends import (
    INSIDE,
    KEEP,
    PAPER_KEPT,
    RECOMPUTE,
    SEED,
    SWAP,
    host_store,
    installed,
    make_backend,
    poison,  # noqa: F401
)
from families import tiny, tokens
from low_rank_adamw import low_rank_adamw

from hmt_deepspeed.optim.backward.linear import _PATCHED
from hmt_deepspeed.optim.backward.projected_linear import InputGroup

pytestmark = pytest.mark.usefixtures("poison")

OPTIONS = {"rank": 4, "probes": 2, "update_interval": 3, "scale": 1.0, "lr": 1e-2}
PROJECT = {"projected_inputs": "project"}
STEPS = 4


def train(policy=None, accumulation=1, **changes):
    """Weights and the report of the last step of a run; every window of a schedule is met."""
    model = tiny("llama", num_hidden_layers=2)
    options = {**OPTIONS, **changes}
    if "method" in changes:
        del options["probes"]
    optimizer = low_rank_adamw(model, **options)
    backend = None if policy is None else make_backend(model, policy)
    if backend is not None:
        backend.install()
    reports = []
    for step in range(STEPS):
        if backend is not None:
            backend.begin_step()
        for part in range(accumulation):
            torch.manual_seed(SEED + step + 100 * part)
            batch = tokens()
            model(input_ids=batch, labels=batch).loss.backward()
        if backend is not None:
            reports.append(backend.report())
        _assert_nothing_is_left(model)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], reports


def _assert_nothing_is_left(model):
    for module in model.modules():
        if module in _PATCHED:
            group = _PATCHED[module].linear.group
            assert group._product is None
            assert group._input is None


@cache
def expected_weights(accumulation=1, **changes):
    """Of a run without a backend."""
    return train(accumulation=accumulation, **changes)[0]


@pytest.mark.parametrize(
    ("policy", "accumulation"),
    [(PAPER_KEPT, 1), (PAPER_KEPT, 2), (KEEP, 2), (RECOMPUTE, 2)],
    ids=["paper", "paper, accumulated", "keep, accumulated", "recompute, accumulated"],
)
def test_training_is_the_same(policy, accumulation):
    expected = expected_weights(accumulation)
    found, _ = train(policy, accumulation)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "changes", [{"share_basis": True}, {"projection": "left"}, {"method": "apollo"}]
)
def test_kinds_of_projection(changes):
    expected, _ = train(**changes)
    found, _ = train(PAPER_KEPT, **changes)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("projection", "policy", "held"),
    [
        ("right", PAPER_KEPT, {}),
        ("right", KEEP, PROJECT),
        ("two_sided", PAPER_KEPT, PROJECT),
        ("two_sided", KEEP, {}),
    ],
    ids=["right, paper", "right, keep", "two-sided, paper", "two-sided, keep"],
)
def test_columns_that_are_drawn_for_each_use(policy, held, projection):
    """What draws them is no operation of the linear: the backend neither holds nor repeats it."""
    changes = {"range_finder": "random", "projection": projection}
    expected = expected_weights(**changes)
    found, _ = train(policy | held, **changes)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_columns_that_are_drawn_are_not_encoded():
    encoded = PAPER_KEPT | {"attention_qkv": "int8", "mlp_intermediate": "int8"} | PROJECT
    _, drawn = train(encoded, range_finder="random")
    _, stored = train(encoded, update_interval=100)
    assert drawn[-1].hits == stored[-1].hits


@pytest.mark.parametrize(
    ("policy", "rerun"), [(PAPER_KEPT, ["attention_qkv"]), (RECOMPUTE, INSIDE)]
)
def test_products_are_held_and_shared_and_not_computed_again(monkeypatch, policy, rerun):
    model = tiny("llama")
    options = OPTIONS | {"update_interval": 100, "max_full_gradient_bytes": 2**30}
    optimizer = low_rank_adamw(model, **options)
    for _ in range(2):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    computed = []
    compute = InputGroup._compute
    monkeypatch.setattr(InputGroup, "_compute", lambda *a: (computed.append(1), compute(*a))[1])
    with installed(model, policy | PROJECT) as backend:
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        report = backend.report()
    assert len(computed) == 2 * 4  # in forward; a replay does not even gather the columns
    active = [site for _, (site, *_) in sorted_sites(model) if site.active]
    assert len(active) > 10  # of 14
    assert report.bytes_by_label["projected_inputs"] == 16 * (4 + 2) * 4 * len(active)
    # q, k, v share one product, gate and up one; o and down have their own
    assert report.hits["model.layers.0"]["projected_inputs"] == 4
    # neither a product, nor down_proj, although it saves its product after computing its output
    assert set(report.rerun) == set(rerun)
    assert report.unread == {}


def test_products_may_be_computed_again():
    def products(choices):
        model = tiny("llama")
        optimizer = low_rank_adamw(model, **OPTIONS | {"update_interval": 100})
        for _ in range(2):
            model(input_ids=tokens(), labels=tokens()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with installed(model, PAPER_KEPT | choices) as backend:
            model(input_ids=tokens(), labels=tokens()).loss.backward()
            report = backend.report()
        _assert_nothing_is_left(model)
        return [site.take() for _, (site, *_) in sorted_sites(model)], report

    held, _ = products(PROJECT)
    found, report = products({})
    for one, other in zip(found, held, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert "projected_inputs" not in report.bytes_by_label
    hits = sum(report.hits[n]["projected_inputs"] for n in report.hits)
    assert report.rerun["projected_inputs"] == hits


def test_one_layer_may_hold_its_products_and_another_not():
    model = tiny("llama")
    optimizer = low_rank_adamw(
        model, **OPTIONS | {"update_interval": 100, "max_full_gradient_bytes": 2**30}
    )
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with installed(model, PAPER_KEPT, overrides={"layers.1$": PROJECT}) as backend:
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        report = backend.report()
    assert set(report.rerun) == {"attention_qkv", "projected_inputs"}
    held = {layer for layer, labels in report.held_bytes.items() if "projected_inputs" in labels}
    assert held == {"model.layers.1"}
    again = report.hits["model.layers.0"]["projected_inputs"]
    assert report.rerun["projected_inputs"] == again > 0


def test_an_exception_in_the_middle_leaves_the_groups_in_step():
    model = tiny("llama")
    optimizer = low_rank_adamw(model, **OPTIONS)
    batch = tokens()

    def step():
        torch.manual_seed(SEED)
        model(input_ids=batch, labels=batch).loss.backward()

    step()
    optimizer.step()
    optimizer.zero_grad()
    with installed(model, PAPER_KEPT):
        step()
        expected = [site.take() for _, (site, *_) in sorted_sites(model)]
        norm = model.model.layers[0].post_attention_layernorm
        handle = norm.register_forward_hook(_fail_in_backward)
        with pytest.raises(ArithmeticError):
            step()
        handle.remove()
        for _, (site, *_) in sorted_sites(model):
            site.take()
        model.zero_grad()
        step()
        found = [site.take() for _, (site, *_) in sorted_sites(model)]
    assert sum(e is not None for e in expected) > 0
    for f, e in zip(found, expected, strict=True):
        assert (f is None) == (e is None)
        assert f is None or torch.equal(f, e)
    _assert_nothing_is_left(model)


def sorted_sites(model):
    return [(n, _PATCHED[m]) for n, m in model.named_modules() if m in _PATCHED]


def _fail_in_backward(*_):
    if torch._C._current_graph_task_id() != -1:
        raise ArithmeticError("in the middle of a backward")


def _twice(model, embedded):
    """The loss with a gradient penalty, and a gradient and a tangent by torch.func."""

    def loss(embedded):
        return model(inputs_embeds=embedded).logits.square().mean()

    found = [
        torch.func.grad(loss)(embedded),
        torch.func.jvp(loss, (embedded,), (embedded.cos(),))[1],
    ]
    embedded = embedded.clone().requires_grad_()
    value = loss(embedded)
    (gradient,) = torch.autograd.grad(value, embedded, create_graph=True)
    (value + 1e3 * gradient.square().sum()).backward()
    return found


def test_gradients_of_gradients():
    """Checkpointed layers are computed again as often as they are differentiated, and are just called by torch.func."""
    torch.manual_seed(SEED)
    embedded = torch.randn(2, 8, 32)
    plain, model = (tiny("llama", attn_implementation="eager") for _ in range(2))
    expected = _twice(plain, embedded)
    optimizer = low_rank_adamw(
        model, **OPTIONS | {"update_interval": 100, "max_full_gradient_bytes": 2**30}
    )
    for slot in optimizer._bases.slots:
        slot.prepare(0, due=False)
    with installed(model, SWAP | PROJECT | {"lm_head": "swap_host"}, store=host_store()) as backend:
        found = _twice(model, embedded)
        assert backend.report().hits  # the penalty's calls were held
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    ordinary = dict(plain.named_parameters())
    for slot in optimizer._bases.slots:
        wanted = ordinary[slot.name].grad @ slot.matrix.projection
        error = (slot.reduced() - wanted).abs().max()
        assert error <= 1e-5 * wanted.abs().max()  # fp32: sums in another order

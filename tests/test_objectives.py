"""The losses against plain sums, and what truncation and fresh noise do to them."""

import pytest
import torch

from lib import objectives
from lib.boundary import never as NEVER
from lib.exits import distribution
from lib.training import Recipe
from tests.models import small, tokens

POSITIONS, LABELS = torch.tensor([2, 4, 6]), torch.tensor([[1, -100, 3], [2, 3, -100], [4, 5, 6]])


def test_the_last_steps_loss_is_the_mean_over_answers():
    model, ids = small().double(), tokens()
    log_p = model(ids, loops=3).logits.log_softmax(-1)
    each = [-log_p[b, p, LABELS[b, a]] for b in range(3) for a, p in enumerate(POSITIONS) if LABELS[b, a] >= 0]
    got = objectives.last(model, ids, POSITIONS, LABELS, 3)
    torch.testing.assert_close(got, torch.stack(each).mean())


@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_the_exit_weighted_loss_is_the_expected_loss_less_the_entropy(entropy):
    model, ids = small(block="sandwich", boundary=1, exit_gate=True).double(), tokens()
    states = list(model.trajectory(ids, 3))
    gates = torch.cat([model.exit_gate(model.norm(z)) for z in states], dim=-1)
    p, log_p = distribution(gates), [model(ids, loops=k).logits.log_softmax(-1) for k in (1, 2, 3)]
    each = []
    for b in range(3):
        for a, t in enumerate(POSITIONS):
            if LABELS[b, a] >= 0:
                expected = sum(p[b, t, k] * -log_p[k][b, t, LABELS[b, a]] for k in range(3))
                each.append(expected + entropy * sum(p[b, t, k] * p[b, t, k].log() for k in range(3)))
    got = objectives.exit_weighted(model, ids, POSITIONS, LABELS, 3, entropy)
    torch.testing.assert_close(got, torch.stack(each).mean(), atol=1e-7, rtol=1e-7)
    got.backward()
    assert model.exit_gate.weight.grad.abs().sum() > 0


def test_truncation_cuts_the_gradient_and_not_the_value():
    grads, values = [], []
    for backprop in (None, 5, 2):
        model = small(envelope="sandwich", injection="concat").double()
        loss = objectives.last(model, tokens(), POSITIONS, LABELS, 5, backprop=backprop)
        loss.backward()
        values.append(loss.detach())
        grads.append({n: q.grad.clone() for n, q in model.named_parameters()})
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])
    assert not torch.allclose(grads[0]["core.0.attention.o.weight"], grads[2]["core.0.attention.o.weight"])
    assert all(g.abs().sum() > 0 for n, g in grads[2].items() if "prelude" in n), "the prelude learns through what is injected"
    # by hand: three steps without gradient, then two with
    model = small(envelope="sandwich", injection="concat").double()
    e = model.embed(tokens())
    with torch.no_grad():
        z = e
        for t in range(3):
            z = model.step(z, e, t, boundary=NEVER)
    for t in (3, 4):
        z = model.step(z, e, t, boundary=NEVER)
    logits = model.readout(z, POSITIONS)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), LABELS.flatten()).backward()
    by_hand = {n: q.grad for n, q in model.named_parameters()}
    for name, grad in grads[2].items():
        torch.testing.assert_close(by_hand[name], grad, atol=1e-12, rtol=1e-9)


def test_the_recipe_chooses():
    model, ids = small(block="sandwich", boundary=1, exit_gate=True), tokens()
    last, weighted = (Recipe(1, 1, 1.0, loss=name) for name in objectives.LOSSES)
    a, b = (objectives.loss(model, ids, POSITIONS, LABELS, 3, recipe) for recipe in (last, weighted))
    assert torch.equal(a, objectives.last(model, ids, POSITIONS, LABELS, 3)) and not torch.equal(a, b)
    with pytest.raises(ValueError, match="loss is 'first': it must be one of last, exit_weighted"):
        Recipe(1, 1, 1.0, loss="first")
    with pytest.raises(ValueError, match="no exit gate"):
        objectives.loss(small(), ids, POSITIONS, LABELS, 3, weighted)

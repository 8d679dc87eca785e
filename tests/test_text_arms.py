"""The appendix's arms on text: equal in layers, unequal in envelope, and keyed by what determines them."""

import dataclasses

from lib import pretrain, text_arms
from lib.store import key


def test_the_arms_store_and_execute_as_many_layers_and_differ_in_the_envelope_alone():
    recipes = {arm: text_arms.recipe_of(arm, 24, 0) for arm in text_arms.ARMS}
    configs = {arm: recipe.config(2048) for arm, recipe in recipes.items()}
    assert {(c.stored_layers, c.executed_layers) for c in configs.values()} == {(4, 16)}
    full, sandwich = (recipes[arm].model_dump() for arm in ("full", "sandwich"))
    envelope = {"prelude", "core", "coda", "loops"}
    rest = [{k: v for k, v in r.pop("model").items() if k not in envelope} for r in (full, sandwich)]
    assert full == sandwich and rest[0] == rest[1]
    assert recipes["full"].steps == 24 and recipes["full"].evaluate_every == 4


def test_a_run_is_named_by_recipe_and_corpus(tmp_path, monkeypatch):
    about = {"sha256": "a"}
    monkeypatch.setattr(pretrain, "corpus_of", lambda recipe: pretrain.Corpus(tmp_path, about))
    jobs = [text_arms.Job(text_arms.recipe_of("full", steps, seed), tmp_path) for steps, seed in ((12, 0), (12, 1), (13, 0))]
    keys = {key(job.spec()) for job in jobs} | {key(dataclasses.replace(jobs[0], root=tmp_path / "else").spec())}
    assert len(keys) == 3
    about["sha256"] = "b"
    assert key(jobs[0].spec()) not in keys
    assert text_arms.stored(jobs[0]) is None

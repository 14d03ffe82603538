"""Quality numbers carry their protocol; a claim's verdict cannot be better than its form and its check allow."""

from __future__ import annotations

import json
import math

import pytest
import torch

from helpers import claims, quality
from helpers.errors import MeasurementRefused, UnknownNameError


def uniform(ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, ids.shape[1], 50)


def test_perplexity_of_a_uniform_model_is_the_vocabulary_size():
    result = quality.perplexity(uniform, torch.arange(40) % 50, window=10, corpus="counting")
    assert result.value == pytest.approx(50)
    assert result.n == 4 * 9 and "window 10" in result.protocol and "counting" in result.protocol


def test_perplexity_of_a_model_that_knows_the_next_token_is_one():
    def knows(ids: torch.Tensor) -> torch.Tensor:
        logits = torch.full((1, ids.shape[1], 50), -100.0)
        logits[0, torch.arange(ids.shape[1]), (ids[0] + 1) % 50] = 100.0
        return logits

    assert quality.perplexity(knows, torch.arange(30) % 50, window=10, corpus="counting").value == pytest.approx(1)


def test_perplexity_agrees_with_transformers_own_loss(bundled_model):
    from helpers.corpora import prose_ids
    from helpers.models import load_model, load_tokenizer

    model = load_model(str(bundled_model))
    ids = prose_ids(load_tokenizer(str(bundled_model)), "evaluation", 256)
    ours = quality.perplexity(lambda x: model(x).logits, ids, window=256, corpus="prose").value
    with torch.inference_mode():
        theirs = math.exp(model(ids[None], labels=ids[None]).loss)
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_another_window_is_another_protocol():
    ids = torch.arange(40) % 50
    short, longer = (quality.perplexity(uniform, ids, window=w, corpus="counting") for w in (10, 20))
    assert short.protocol != longer.protocol


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(MeasurementRefused, match="needs at least that many"):
        quality.perplexity(uniform, torch.arange(5), window=10, corpus="counting")


def test_kl_is_zero_for_equal_logits_positive_otherwise_and_right_for_two_outcomes():
    p, q = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
    assert quality.kl_divergence(p.log(), p.log()) == pytest.approx(0, abs=1e-12)
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert quality.kl_divergence(p.log(), q.log()) == pytest.approx(expected, rel=1e-6)
    assert quality.kl_divergence(p.log() + 7, q.log() - 3) == pytest.approx(expected, rel=1e-6)


def test_greedy_match_tells_a_tie_from_a_difference():
    near = torch.tensor([[5.0, 0.0], [1.0, 1.0005]])
    far = torch.tensor([[5.0, 0.0], [1.0, 3.0]])
    assert quality.greedy_match([0, 1], [0, 1]).verdict == "identical"
    assert quality.greedy_match([0, 1], [0, 0], near).verdict == "tie"
    assert quality.greedy_match([0, 1], [0, 0], far).verdict == "differs"
    assert quality.greedy_match([0, 1], [0]).agree == 1 and quality.greedy_match([0, 1], [0]).verdict == "differs"


def test_agreement_has_an_interval_and_refuses_unpaired_outputs():
    result = quality.greedy_agreement([[1], [2], [3]], [[1], [2], [4]], "greedy, 1 token")
    assert result.value == pytest.approx(2 / 3) and result.low < 2 / 3 < result.high
    with pytest.raises(MeasurementRefused, match="in pairs"):
        quality.greedy_agreement([[1]], [], "greedy")


def test_every_claim_of_the_catalogue_is_whole_and_ids_are_unique():
    from helpers.corpora import data_file

    rows = json.loads(data_file("claims.json").read_text())
    assert len({row["id"] for row in rows}) == len(rows) == len(claims.catalogue())
    for one in claims.catalogue().values():
        assert all((one.quoted, one.setting, one.source, one.check, one.venue)), one.id


@pytest.mark.parametrize(
    ("form", "passed", "verdict"),
    [
        ("exact", True, "reproduced"),
        ("exact", False, "not reproduced"),
        ("direction", True, "direction only"),
        ("direction", False, "not reproduced"),
        ("exact", None, "not run here"),
    ],
)
def test_the_verdict_follows_from_form_and_check(form, passed, verdict):
    one = next(c for c in claims.catalogue().values() if c.form == form)
    assert claims.judge(one, passed, "x", reason="no GPU").verdict == verdict


def test_a_check_that_was_not_run_needs_a_reason_and_a_misspelt_claim_is_corrected():
    with pytest.raises(ValueError, match="needs a reason"):
        claims.judge(claims.claim("mqa-cache"), None, "")
    with pytest.raises(UnknownNameError, match="Did you mean 'mqa-cache'"):
        claims.claim("mqa-cach")

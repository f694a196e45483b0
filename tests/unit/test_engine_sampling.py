"""Drawn tokens follow the distribution whose log-probs are reported, from numbers that belong to positions."""

import numpy as np
import torch

from experiments.engines.sampling import draw, sampled_log_probs, uniforms


def logits_of(*probs: float) -> torch.Tensor:
    return torch.log(torch.tensor([probs]))


def test_without_truncation_the_log_probs_are_those_of_the_tempered_softmax():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 4
    log_probs = sampled_log_probs(logits.to(torch.bfloat16), temperature=0.7, top_p=1.0)
    expected = torch.log_softmax(logits.to(torch.bfloat16).double() / 0.7, dim=-1)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), expected, atol=1e-5, rtol=0)


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p_and_is_renormalised():
    log_probs = sampled_log_probs(logits_of(0.1, 0.4, 0.05, 0.3, 0.15), temperature=1.0, top_p=0.75)
    torch.testing.assert_close(log_probs.exp(), torch.tensor([[0.0, 0.4, 0.0, 0.3, 0.15]]) / 0.85)


def test_the_nucleus_mass_is_one_for_any_logits():
    logits = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)) * 3
    log_probs = sampled_log_probs(logits, temperature=1.3, top_p=0.6)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(200), atol=1e-5, rtol=0)
    kept = log_probs > -torch.inf
    full = torch.softmax(logits / 1.3, dim=-1)
    mass, smallest = (full * kept).sum(-1), full.masked_fill(~kept, 2.0).min(-1).values
    assert (mass >= 0.6 - 1e-6).all()
    assert (mass - smallest < 0.6 + 1e-6).all(), "one token less would do"


def test_of_equal_tokens_the_lower_id_stays_and_the_most_likely_token_always_does():
    log_probs = sampled_log_probs(logits_of(0.25, 0.25, 0.25, 0.25), temperature=1.0, top_p=0.4)
    torch.testing.assert_close(log_probs.exp(), torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
    log_probs = sampled_log_probs(logits_of(0.2, 0.8), temperature=1.0, top_p=0.01)
    torch.testing.assert_close(log_probs.exp(), torch.tensor([[0.0, 1.0]]))


def test_drawn_frequencies_follow_the_reported_probabilities():
    count = 40_000
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(2)) * 1.5
    log_probs = sampled_log_probs(logits, temperature=0.9, top_p=0.9)
    numbers = uniforms(np.full(count, 7, dtype=np.uint64), np.arange(count))
    tokens, drawn_log_probs = draw(log_probs.expand(count, -1), torch.from_numpy(numbers))
    torch.testing.assert_close(drawn_log_probs, log_probs[0, tokens])
    expected = log_probs[0].exp().numpy() * count
    observed = np.bincount(tokens.numpy(), minlength=12)
    assert (observed[expected == 0] == 0).all()
    kept = expected > 0
    assert 4 < kept.sum() < 12
    chi_square = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_the_extreme_numbers_draw_the_first_and_the_last_possible_token():
    log_probs = torch.log(torch.tensor([[0.0, 0.3, 0.7, 0.0]]))
    numbers = torch.tensor([2.0**-49, 1 - 2.0**-49], dtype=torch.float64)
    tokens, _ = draw(log_probs.expand(2, -1), numbers)
    assert tokens.tolist() == [1, 2]


def test_numbers_are_uniform_and_differ_between_seeds_and_positions():
    seeds = np.arange(200, dtype=np.uint64).repeat(200)
    positions = np.tile(np.arange(200), 200)
    grid = uniforms(seeds, positions).reshape(200, 200)
    assert grid.min() > 0
    assert grid.max() < 1
    assert len(np.unique(grid)) == grid.size
    counts = np.histogram(grid, bins=50, range=(0, 1))[0]
    chi_square = ((counts - 800) ** 2 / 800).sum()
    assert chi_square < 49 + 5 * np.sqrt(2 * 49)
    correlations = np.corrcoef(grid) - np.eye(200)
    assert np.abs(correlations).max() < 6 / np.sqrt(200), "neighbouring seeds are unrelated"
    assert np.array_equal(uniforms(seeds[5:6], positions[5:6]), grid.reshape(-1)[5:6]), "alone as in a batch"

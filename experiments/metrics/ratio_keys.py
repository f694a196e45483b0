"""Keys of everything computed from log-ratios: PPO ratio, gap between rollout and trainer, stability of both.

Legend: D = trainer's minus engine's log-prob of a token, d = current minus old log-prob, A advantage, C cap of the
truncated weights, N tokens, lse log-sum-exp. Expectations are over tokens that the rollout policy sampled.
"""

from __future__ import annotations

from functools import partial

from experiments.metrics.metric import TOKEN_SPLITS, Metric

VERL_PPO = "verl core_algos.py, compute_policy_loss_vanilla"
VERL_CORR = "verl rollout_corr_helper.py"
VERL_DEBUG = "verl utils/debug/metrics.py"

_shadowed = partial(Metric, shadow=True)
_corr = partial(Metric, source=VERL_CORR, in_verl=True, shadow=True)
_debug = partial(Metric, source=VERL_DEBUG, in_verl=True, shadow=True)
_actor = partial(Metric, source="verl", in_verl=True)

# PPO side: d = log_prob - old_log_prob, A advantage.
PPO_KL = _shadowed(
    "actor/ppo_kl",
    "mean(-d), d clamped to +-20 (k1), over all tokens of all mini-steps of the update. verl averages the "
    "mini-steps with equal weight; with equal token counts the two agree",
    "nats",
    "real",
    "mean",
    source=VERL_PPO,
    in_verl=True,
    healthy="near 0; read with a spread statistic. In decoupled mode blind to the strategy: 0 on the first mini-step",
    splits=(*TOKEN_SPLITS, "mini_step"),
)
PPO_KL_K2 = _shadowed("ppo/kl_k2", "mean(d^2 / 2)", "nats", ">= 0", "mean")
PPO_KL_K3 = _shadowed(
    "ppo/kl_k3", "mean(e^d - 1 - d)", "nats", ">= 0", "mean", healthy="1e-4 to 1e-3", splits=("versions", "mini_step")
)
PG_CLIPFRAC = _shadowed(
    "actor/pg_clipfrac",
    "share of tokens whose clipped loss exceeds the unclipped one (depends on the sign of A)",
    "1",
    "0..1",
    "mean",
    source=VERL_PPO,
    in_verl=True,
    healthy="1e-4 to 1e-2; bursts precede collapse (arXiv 2510.23027)",
    splits=(*TOKEN_SPLITS, "mini_step"),
)
PG_CLIPFRAC_LOWER = _shadowed(
    "actor/pg_clipfrac_lower",
    "share of tokens with A < 0 and the dual clip active (0 with sequence-level ratios, which have none)",
    "1",
    "0..1",
    "mean",
    source=VERL_PPO,
    in_verl=True,
    healthy="about 0",
)
PPO_SEQ_RATIO = _shadowed(
    "ppo/seq_ratio",
    "mean over sequences of exp(mean_t d)",
    "1",
    "> 0",
    "SS",
    source="arXiv 2507.18071",
    healthy="GSPO clips at 3e-4 / 4e-4 around 1",
)
PPO_SEQ_RATIO_MIN = _shadowed("ppo/seq_ratio_min", "smallest exp(mean_t d) of a sequence", "1", "> 0", "ext")
PPO_SEQ_RATIO_MAX = _shadowed("ppo/seq_ratio_max", "largest exp(mean_t d) of a sequence", "1", "> 0", "ext")
PPO_BAD_UPDATE = _shadowed(
    "ppo/bad_update_frac",
    "share of tokens with A < 0 and e^mu - p >= 0.5, mu the engine's log-prob, p the trainer's probability",
    "1",
    "0..1",
    "mean",
    source="arXiv 2602.04879",
    healthy="0.5 % can already harm",
)
PG_LOSS = _actor("actor/pg_loss", "value of the loss, mean over mini-steps", "nats", "real", "mean")
GRAD_NORM = Metric(
    "actor/grad_norm",
    "L2 norm of the gradient before clipping, mean over mini-steps",
    "1",
    ">= 0",
    "mean",
    source="verl",
    in_verl=True,
    healthy="KL spikes coincide with its jumps",
)
ENTROPY = _actor("actor/entropy", "mean entropy of the predicting distribution over tokens", "nats", ">= 0", "mean")
LEARNING_RATE = _actor("actor/lr", "learning rate of the update", "1", ">= 0", "value")
KL_LOSS = _actor(
    "actor/kl_loss", "mean KL penalty against the reference, before its coefficient", "nats", "real", "mean"
)

# Rollout against trainer: D = trainer log-prob - engine log-prob of the same token.
GAP_ABS = _shadowed(
    "gap/abs",
    "mean(|D|). Primary metric of training runs",
    "nats",
    ">= 0",
    "mean",
    source="slime train_rollout_logprob_abs_diff",
    healthy="slime's CI: <= 0.1; 1e-6 when deterministic and fresh",
    splits=TOKEN_SPLITS,
)
GAP_ABS_P99 = _shadowed("gap/abs_p99", "99th percentile of |D|", "nats", ">= 0", "SS")
GAP_ABS_P999 = _shadowed("gap/abs_p99.9", "99.9th percentile of |D|", "nats", ">= 0", "SS")
GAP_ABS_MAX = _shadowed("gap/abs_max", "largest |D|", "nats", ">= 0", "ext")
CORR_KL = _corr(
    "rollout_corr/kl",
    "mean(-D): k1 of KL(rollout || trainer)",
    "nats",
    "real",
    "mean",
    healthy="warn above 0.1 in size",
    splits=TOKEN_SPLITS,
)
CORR_K3 = _corr(
    "rollout_corr/k3_kl",
    "mean(e^D - 1 - D), D clamped to +-20 (verl: not clamped): k3 of KL(rollout || trainer)",
    "nats",
    ">= 0",
    "mean",
    healthy="<= 1e-3 low, 2e-2 medium, 1e-1 high",
    splits=TOKEN_SPLITS,
)
GAP_K3_TRIM = _shadowed(
    "gap/k3_trim", "mean of e^D - 1 - D without the largest 0.1 % of tokens (at least one)", "nats", ">= 0", "SS"
)
GAP_K3_TOP = _shadowed(
    "gap/k3_top_share",
    "share of the sum of e^D - 1 - D that the largest 0.1 % of tokens (at least one) hold; missing when the sum is 0",
    "1",
    "0..1",
    "SS",
    healthy="near 1: a few tokens decide",
)
GAP_SQ = _shadowed("gap/sq", "mean(D^2)", "nats^2", ">= 0", "mean")
GAP_MULT = _shadowed(
    "gap/token_mult_error",
    "mean(e^|D|), D clamped to +-20",
    "1",
    ">= 1",
    "mean",
    source="NeMo-RL token_mult_prob_error",
    healthy="< 1.02",
)
GAP_FLOOR_ABS = Metric(
    "gap/floor_abs",
    "mean |difference| of two trainer forwards with equal weights and routes: the run's own views, as shadow "
    "scoring and as the first mini-step saw them",
    "nats",
    ">= 0",
    "mean",
    healthy="differences between strategies below the floor are not distinguishable",
)
GAP_FLOOR_P99 = Metric("gap/floor_abs_p99", "99th percentile of the same", "nats", ">= 0", "SS")
GAP_FLOOR_MAX = Metric("gap/floor_abs_max", "largest of the same", "nats", ">= 0", "ext")
GAP_FLOOR_K3 = Metric("gap/floor_k3", "mean(e^x - 1 - x) of the same differences x", "nats", ">= 0", "mean")
GAP_SHIFT = Metric(
    "gap/shift_best",
    "shift in {-1, 0, 1} at which trainer log-prob t correlates best with engine log-prob t + shift of a rollout",
    "tokens",
    "-1, 0, 1",
    "value",
    healthy="0, anything else is an alignment fault",
)
GAP_MISSING = _shadowed(
    "gap/missing_log_probs",
    "tokens left out because the engine returned no log-prob (NaN)",
    "tokens",
    ">= 0",
    "count",
    healthy="0",
)
PROBS_DIFF_MEAN = _debug(
    "training/rollout_probs_diff_mean",
    "mean |p - q|, p trainer's and q engine's probability",
    "1",
    "0..1",
    "mean",
    healthy="< 0.01",
)
PROBS_DIFF_MAX = _debug("training/rollout_probs_diff_max", "largest |p - q|", "1", "0..1", "ext")
PROBS_DIFF_STD = _debug(
    "training/rollout_probs_diff_std",
    "standard deviation (unbiased) of |p - q|; missing for one token",
    "1",
    ">= 0",
    "SS",
)
PROBS_PEARSON = _shadowed(
    "training/rollout_actor_probs_pearson_corr",
    "correlation of p and q; missing when either is constant",
    "1",
    "-1..1",
    "SS",
    source=f"{VERL_DEBUG}; arXiv 2506.13585",
    in_verl=True,
    healthy="> 0.99",
)
CORR_TRAINING_PPL = _corr(
    "rollout_corr/training_ppl",
    "mean over sequences of exp(-mean_t trainer log-prob)",
    "1",
    ">= 1",
    "SS",
    healthy="equal to rollout_ppl",
)
CORR_ROLLOUT_PPL = _corr(
    "rollout_corr/rollout_ppl", "mean over sequences of exp(-mean_t engine log-prob)", "1", ">= 1", "SS"
)
CORR_LOG_PPL_DIFF = _corr(
    "rollout_corr/log_ppl_diff",
    "mean over sequences of g = mean_t engine - mean_t trainer log-prob; positive: the trainer is less sure",
    "nats",
    "real",
    "SS",
    healthy="0",
)
CORR_LOG_PPL_ABS = _corr(
    "rollout_corr/log_ppl_abs_diff", "mean over sequences of |g|", "nats", ">= 0", "SS", healthy="0"
)
CORR_LOG_PPL_MAX = _corr("rollout_corr/log_ppl_diff_max", "largest g", "nats", "real", "ext")
CORR_LOG_PPL_MIN = _corr("rollout_corr/log_ppl_diff_min", "smallest g", "nats", "real", "ext")
CORR_PPL_RATIO = _corr(
    "rollout_corr/ppl_ratio",
    "mean over sequences of e^g (verl's code; its documentation has the exponential of the mean)",
    "1",
    "> 0",
    "SS",
    healthy="1",
)

# Stability of a ratio e^x: `gap_ratio` has x = D, `ppo_ratio` has x = d. C is the cap of the truncated weights.
RATIO_PERCENTILE = _shadowed(
    "{ratio}/p{q}",
    "e^(q-th percentile of x, linear interpolation)",
    "1",
    "> 0",
    "SS",
    healthy="symmetric about 1 in log space",
)
RATIO_MEAN = _shadowed("{ratio}/ratio_mean", "mean e^x, untruncated", "1", "> 0", "SS", healthy="about 1")
RATIO_STD = _shadowed("{ratio}/ratio_std", "standard deviation (biased) of e^x", "1", ">= 0", "SS")
RATIO_MIN = _shadowed("{ratio}/ratio_min", "smallest e^x", "1", "> 0", "ext")
RATIO_MAX = _shadowed("{ratio}/ratio_max", "largest e^x", "1", "> 0", "ext")
RATIO_F2 = _shadowed(
    "{ratio}/F2",
    "share of tokens with |x| > ln 2",
    "1",
    "0..1",
    "mean",
    source="AReaL extreme_frac_tau2; arXiv 2510.11370",
    healthy="<= 1e-4 with replay; > 0.1 preceded collapse",
    splits=TOKEN_SPLITS,
)
RATIO_F5 = _shadowed(
    "{ratio}/F5", "share of tokens with |x| > ln 5", "1", "0..1", "mean", source="AReaL extreme_frac_tau5"
)
RATIO_ESS = _shadowed(
    "{ratio}/ess_raw",
    "exp(2 lse(x) - lse(2x) - ln N) = (sum w)^2 / (N sum w^2), untruncated",
    "1",
    "1/N..1",
    "SS",
    source="arXiv 2602.17616",
    healthy="drops precede collapse",
    splits=(*TOKEN_SPLITS, "mini_step"),
)
RATIO_CHI2_SEQ_LOG = _shadowed(
    "{ratio}/log1p_chi2_seq",
    "lse over sequences of 2 D_i, minus ln M; D_i = sum_t x of sequence i, M sequences",
    "nats",
    "real",
    "SS",
    healthy="grows with length: compare at equal lengths",
)
RATIO_M2 = _shadowed(
    "{ratio}/m2", "mean(x^2)", "nats^2", ">= 0", "mean", source="arXiv 2510.01161", splits=TOKEN_SPLITS
)
RATIO_CLAMPED = _shadowed(
    "{ratio}/clamped_frac",
    "share of tokens with |x| > 20, clamped inside exponentials",
    "1",
    "0..1",
    "mean",
    healthy="0",
)
RATIO_NONFINITE = _shadowed(
    "{ratio}/nonfinite",
    "tokens with a NaN or infinite log-prob; above 0 the step fails",
    "tokens",
    "0",
    "count",
    healthy="0",
)
PPO_ESS_TRUNC = _shadowed("ppo_ratio/ess_trunc", "effective sample size of min(e^d, C) over N", "1", "1/N..1", "SS")
PPO_CHI2 = _shadowed("ppo_ratio/chi2_token", "exp(lse(2d) - ln N) - 1", "1", "> -1", "SS")
CORR_IS_ESS = _corr(
    "rollout_corr/rollout_is_eff_sample_size",
    "effective sample size of min(e^D, C) over N",
    "1",
    "1/N..1",
    "SS",
    healthy="warn below 0.3; hides the tail, read with gap_ratio/ess_raw",
)
CORR_CHI2 = _corr(
    "rollout_corr/chi2_token", "exp(lse(2D) - ln N) - 1", "1", "> -1", "SS", healthy="well below 1; warn above"
)
CORR_CHI2_SEQ = _corr(
    "rollout_corr/chi2_seq",
    "mean over sequences of e^(2 sum_t D), the sum clamped to +-20, minus 1",
    "1",
    "> -1",
    "SS",
    healthy="read gap_ratio/log1p_chi2_seq",
)
CORR_IS_HIGH = _corr(
    "rollout_corr/rollout_is_ratio_fraction_high",
    "share of tokens with e^D > C",
    "1",
    "0..1",
    "mean",
    healthy="about 0",
)
CORR_IS_LOW = _corr(
    "rollout_corr/rollout_is_ratio_fraction_low",
    "share of tokens with e^D < 1/C",
    "1",
    "0..1",
    "mean",
    healthy="about 0",
)
CORR_IS_MEAN = _corr(
    "rollout_corr/rollout_is_mean", "mean of the truncated weights min(e^D, C)", "1", "> 0", "mean", healthy="0.5 to 2"
)
CORR_IS_STD = _corr(
    "rollout_corr/rollout_is_std",
    "standard deviation (biased) of the truncated weights",
    "1",
    ">= 0",
    "SS",
    healthy="< 1",
)
CORR_IS_MAX = _corr("rollout_corr/rollout_is_max", "largest truncated weight", "1", "> 0", "ext")
CORR_IS_MIN = _corr("rollout_corr/rollout_is_min", "smallest truncated weight", "1", "> 0", "ext")

"""Keys of all that is not a log-ratio: routes, merge error, decomposition, replay, staleness, rewards, the loop.

Legend: A, B the expert sets of one position and layer (a cell) in two sources, o = |A and B|, k experts per token, L
MoE layers, m the merge error of a token.
"""

from __future__ import annotations

from functools import partial

from experiments.metrics.metric import TOKEN_SPLITS, Metric

VERL_ASYNC = "verl fully_async_policy/detach_utils.py"
MERGE_SPLITS = (*TOKEN_SPLITS, "boundary")

_route = partial(Metric, splits=("source",), shadow=True)
_async = partial(Metric, source=VERL_ASYNC, in_verl=True)
_count = partial(Metric, unit="1", values=">= 0", averaging="count")
_cells = partial(Metric, unit="cells", values=">= 0", averaging="count", healthy="0")

# Router agreement. Without a suffix: the strategy's rows against those of the exact view, prefix included.
# `_by_source/live_before` and `live_after`: against the trainer's live router before and after the update.
ROUTE_OVERLAP = _route("route/overlap", "mean o/k over cells", "1", "0..1", "mean", source="arXiv 2507.18071")
ROUTE_MISMATCH = _route(
    "route/set_mismatch", "share of cells with A != B", "1", "0..1", "mean", source="arXiv 2510.11370"
)
ROUTE_TOKEN_ANY = _route("route/token_any_mismatch", "share of positions with A != B in any layer", "1", "0..1", "mean")
ROUTE_LAYERS = _route("route/layers_differ", "mean number of layers with A != B per position", "layers", "0..L", "mean")
ROUTE_ZERO = _route(
    "route/zero_overlap", "share of cells with o = 0", "1", "0..1", "mean", healthy="CI limit of miles: 1e-2"
)
ROUTE_IDENTICAL = _route("route/identical_frac", "share of cells with o = k", "1", "0..1", "mean")
ROUTE_ONE_SLOT = _route("route/one_slot_frac", "share of cells with o = k - 1", "1", "0..1", "mean")
ROUTE_CHURN = Metric(
    "route/churn",
    "1 - mean o/k between consecutive calls of a rollout, on positions that both returned",
    "1",
    "0..1",
    "mean",
    healthy="0 when the weights did not change; bounds how far the rows of replace and slice_concat differ",
)
ROUTE_CHURN_LAYER = Metric(
    "route/churn_layer/{layer}", "the same in layer 0, 1, ...", "1", "0..1", "mean", healthy="grows with depth"
)
ROUTE_MARGIN = Metric(
    "route/margin_p5",
    "5th percentile of the k-th minus the (k+1)-th router score, live router",
    "1",
    ">= 0",
    "SS",
    healthy="flips happen near 0",
)
ROUTE_AUDIT = Metric(
    "route/audit_mismatch",
    "share of cells with A != B: recorded rows of the exact view against the live router under the generating weights",
    "1",
    "0..1",
    "mean",
    healthy="0 in fp32; near 1 - 1/C(E, k): rows are shifted, stale or corrupt",
)

# Merge error: m = log-prob under the strategy's rows minus log-prob under the exact view's rows, equal weights.
MERGE_MEAN = Metric("merge/{strategy}/mean", "mean(m)", "nats", "real", "mean", splits=MERGE_SPLITS)
MERGE_ABS = Metric(
    "merge/{strategy}/abs",
    "mean(|m|). Primary metric of offline comparisons. By `prob`: tenths of the engine's probability e^mu, "
    "label d for d/10 <= e^mu < (d+1)/10 (fixed edges: batches merge)",
    "nats",
    ">= 0",
    "mean",
    healthy="0 for exact; in rollouts of one segment 0 for every rule that replays the engine's rows",
    splits=(*MERGE_SPLITS, "prob"),
)
MERGE_P99 = Metric("merge/{strategy}/abs_p99", "99th percentile of |m|", "nats", ">= 0", "SS", splits=MERGE_SPLITS)
MERGE_P999 = Metric("merge/{strategy}/abs_p99.9", "99.9th percentile of |m|", "nats", ">= 0", "SS")
MERGE_MAX = Metric("merge/{strategy}/abs_max", "largest |m|", "nats", ">= 0", "ext")
MERGE_K3 = Metric(
    "merge/{strategy}/k3",
    "mean(e^m - 1 - m): a distance, not an unbiased KL (the tokens were not sampled under the exact rows)",
    "nats",
    ">= 0",
    "mean",
    splits=MERGE_SPLITS,
)
MERGE_F2 = Metric("merge/{strategy}/F2", "share of tokens with |m| > ln 2", "1", "0..1", "mean")
MERGE_NONZERO = Metric(
    "merge/{strategy}/nonzero_frac", "share of tokens with |m| above the noise floor", "1", "0..1", "mean"
)
MERGE_LOSS_FRAC = Metric(
    "merge/{strategy}/loss_frac",
    "share of the exact views' tokens that carry loss under the strategy",
    "1",
    "0..1",
    "mean",
    healthy="below 1 for strategies that mask; compare strategies on common tokens",
)

# Decomposition: D = staleness + merge error + engine mismatch, exactly and per token.
MERGE_EXCLUDED = Metric(
    "merge/excluded_frac",
    "share of rollouts without an exact view, left out of every merge/*: the engine mixed rows inside a call "
    "(retract) or did not return them",
    "1",
    "0..1",
    "mean",
    healthy="0",
)

DECOMP_MEAN = Metric("decomp/{part}_mean", "mean of the part", "nats", "real", "mean", shadow=True)
DECOMP_ABS = Metric("decomp/{part}_abs", "mean |part|; these do not add up", "nats", ">= 0", "mean", shadow=True)
DECOMP_SQ = Metric(
    "decomp/{part}_sq", "mean part^2; add up with twice the cross terms", "nats^2", ">= 0", "mean", shadow=True
)
DECOMP_COV = Metric(
    "decomp/cov_{pair}", "mean of the product of two parts (not centred)", "nats^2", "real", "mean", shadow=True
)
DECOMP_RESIDUAL = Metric(
    "decomp/residual_max",
    "largest |D - sum of the parts|",
    "nats",
    ">= 0",
    "ext",
    healthy="rounding: 1e-6",
    shadow=True,
)
DECOMP_COVERAGE = Metric(
    "decomp/coverage",
    "share of the strategy's tokens whose generating weights were at hand; the parts are over these tokens",
    "1",
    "0..1",
    "mean",
    healthy="1",
    shadow=True,
)
DECOMP_REST_MEAN = Metric(
    "decomp/rest_mean",
    "mean of staleness + engine mismatch, when old weights are missing",
    "nats",
    "real",
    "mean",
    shadow=True,
)
DECOMP_REST_ABS = Metric("decomp/rest_abs", "mean |staleness + engine mismatch|", "nats", ">= 0", "mean", shadow=True)
DECOMP_REST_SQ = Metric("decomp/rest_sq", "mean of its square", "nats^2", ">= 0", "mean", shadow=True)

WEIGHTS_KEPT = Metric(
    "decomp/weights_kept",
    "weight versions kept because a token that is unfinished or waits for the trainer was sampled under them",
    "versions",
    ">= 1",
    "ext",
    healthy="bounded by the largest version lag",
)
WEIGHTS_MIB = Metric("decomp/weights_mib", "their size", "MiB", ">= 0", "ext")

# Replay execution. A cell is (position, layer).
REPLAY_ACTIVE = Metric(
    "replay/active_frac",
    "share of cells computed with replayed routes",
    "1",
    "0..1",
    "mean",
    healthy="1 in a replay arm",
)
REPLAY_FALLBACK = Metric(
    "replay/fallback_frac",
    "share of cells computed with the live router",
    "1",
    "0..1",
    "mean",
    healthy="0 in a replay arm",
)
REPLAY_UNREQUESTED = _cells(
    "replay/unrequested_live", "cells that the live router computed although the strategy gave a row"
)
REPLAY_MISMATCH = _cells("replay/verify_mismatch", "cells whose executed top-k differs from the installed one")
REPLAY_ID_ERRORS = _cells("replay/id_errors", "cells with an id out of range, a repeated id, or a mix of ids and -1")
REPLAY_MISSING = Metric(
    "replay/missing_rows", "rows that views lack (t - 1 are needed)", "rows", ">= 0", "count", healthy="0"
)
REPLAY_SURPLUS = Metric("replay/surplus_rows", "rows that views have too many", "rows", ">= 0", "count", healthy="0")
REPLAY_DROPPED = Metric(
    "replay/dropped_samples/{reason}",
    "refused rollouts by reason",
    "rollouts",
    ">= 0",
    "count",
    healthy="equal for all arms",
)
REPLAY_LAYERS = Metric(
    "replay/layers_used", "routers that consumed a target", "layers", "0..L", "value", healthy="equal to the MoE layers"
)
REPLAY_MODE = Metric(
    "replay/effective_mode", "mode read back from the trainer", "-", "text", "text", healthy="the arm's claim"
)
REPLAY_CONSTANT = Metric(
    "replay/constant_layer",
    "(view, layer) pairs whose ids are equal at all of 8 or more replayed positions",
    "1",
    ">= 0",
    "count",
    healthy="0",
)
REPLAY_REPEATED = Metric(
    "replay/repeated_rows", "replayed rows inside a run of 8 or more equal rows", "rows", ">= 0", "count", healthy="0"
)

# Where rows came from, counted by the cluster back end, whose engines answer more freely (docs/verl.md).
REPLAY_ROLLOUTS = _count("replay/rollouts", "rollouts of the update")
REPLAY_INCOMPLETE = _count("replay/incomplete_rollouts", "rollouts without the rows that the strategy needs")
REPLAY_LIVE_ROLLOUTS = _count("replay/live_rollouts", "those of them that the trainer's own router decided for")
REPLAY_REFUSED_CALLS = _count("replay/refused_calls", "calls whose rows failed a check and count as missing")
REPLAY_SURPLUS_CALLS = _count(
    "replay/surplus_row_calls", "calls that also returned the row of the last sampled token, which is set aside"
)
REPLAY_PHANTOM_CALLS = _count(
    "replay/phantom_log_prob_calls", "calls with a log-prob of a token that they did not return; it is left out"
)
REPLAY_NO_LOG_PROB_CALLS = _count(
    "replay/missing_log_prob_calls", "calls in which a token has no log-prob; it carries no loss"
)

# Staleness and partial rollouts, over generated tokens of the batch's rollouts; the unit is the weight version.
STALE_AGE_MEAN = Metric(
    "stale/age_mean",
    "mean over tokens with a known version of trainer version - token version",
    "versions",
    ">= 0",
    "mean",
)
STALE_AGE_MAX = Metric("stale/age_max", "oldest of the same", "versions", ">= 0", "ext")
STALE_COVERAGE = Metric(
    "stale/version_coverage", "share of generated tokens with a known version", "1", "0..1", "mean", healthy="1"
)
PARTIAL_RATIO = _async(
    "fully_async/partial/partial_ratio", "share of rollouts with tokens of two or more versions", "1", "0..1", "mean"
)
PARTIAL_TOTAL = _async(
    "fully_async/partial/total_partial_num", "rollouts with tokens of two or more versions", "rollouts", ">= 0", "count"
)
PARTIAL_SPAN = _async(
    "fully_async/partial/max_partial_span",
    "largest newest-minus-oldest token version of a rollout (verl: also calls without tokens)",
    "versions",
    ">= 0",
    "ext",
)
STALE_MULTI_TOKENS = Metric(
    "stale/multi_version_token_frac", "share of generated tokens in such rollouts", "1", "0..1", "mean"
)
STALE_SEGMENTS = Metric(
    "stale/segments_{segments}", "rollouts with 1, 2, 3, 4 or more segments with tokens", "rollouts", ">= 0", "count"
)
STALE_EMPTY_ABORTS = _count("stale/empty_aborts", "aborted calls that generated nothing")
STALE_RETRACTIONS = _count("stale/retractions", "requests put back into the engine's queue inside a call")
STALE_MIXED_CALLS = _count(
    "stale/mixed_version_calls", "calls with tokens of two or more versions, or a prefix recomputed inside the call"
)
STALE_RESUMED = Metric(
    "stale/resumed_tokens", "generated tokens in the inputs of calls after the first", "tokens", ">= 0", "count"
)
STALE_REPREFILL = Metric(
    "stale/reprefill_tokens",
    "positions that a later call fed again (retractions inside a call not included)",
    "tokens",
    ">= 0",
    "count",
)
DROPPED_STALE = _async(
    "fully_async/count/dropped_stale_samples",
    "rollouts dropped for their age, since the start",
    "rollouts",
    ">= 0",
    "count",
)
STALE_PROCESSED = _async(
    "fully_async/count/stale_samples_processed",
    "rollouts trained on whose newest token version is older than the trainer's, since the start",
    "rollouts",
    ">= 0",
    "count",
)

# Rewards, lengths and the loop.
REWARD_MEAN = Metric("reward/mean", "mean reward of the batch's rollouts", "1", "task's", "mean")
REWARD_STD = Metric("reward/std", "standard deviation (biased) of the reward", "1", ">= 0", "SS")
REWARD_MIN = Metric("reward/min", "smallest reward", "1", "task's", "ext")
REWARD_MAX = Metric("reward/max", "largest reward", "1", "task's", "ext")
REWARD_SOLVED = Metric("reward/solved_frac", "share of rollouts with the full reward", "1", "0..1", "mean")
REWARD_FLAT_GROUPS = Metric(
    "reward/flat_group_frac", "share of groups with equal rewards: no learning signal", "1", "0..1", "mean"
)
LENGTH_MEAN = Metric(
    "response_length/mean", "mean generated tokens per rollout", "tokens", ">= 0", "mean", source="verl", in_verl=True
)
LENGTH_MAX = Metric(
    "response_length/max", "most generated tokens of a rollout", "tokens", ">= 0", "ext", source="verl", in_verl=True
)
LENGTH_MIN = Metric(
    "response_length/min", "fewest generated tokens of a rollout", "tokens", ">= 0", "ext", source="verl", in_verl=True
)
LENGTH_CLIP = Metric(
    "response_length/clip_ratio",
    "share of rollouts at the length limit",
    "1",
    "0..1",
    "mean",
    source="verl",
    in_verl=True,
)
COUNTED_TOKENS = Metric("loop/counted_tokens", "tokens with loss in the update", "tokens", "> 0", "count")
ROW_BYTES = Metric(
    "loop/row_bytes_per_token",
    "size of the rows of the batch's calls as they travelled (base64 text over HTTP) / tokens with loss",
    "bytes/token",
    ">= 0",
    "mean",
)
TRAINER_VERSION = Metric(
    "loop/trainer_version", "weight version of the trainer at the update", "versions", ">= 0", "value"
)
ENGINE_VERSION = Metric(
    "loop/engine_version", "weight version of the engine at the update", "versions", ">= 0", "value"
)
VIRTUAL_TIME = Metric("loop/virtual_time_s", "virtual clock after the update", "s", ">= 0", "value")
QUEUE_SIZE = Metric("loop/queue_size", "finished rollouts that wait for the trainer", "rollouts", ">= 0", "value")
IN_FLIGHT = Metric(
    "loop/in_flight",
    "rollouts that are not in the queue yet: unfinished ones and finished ones of unfinished groups",
    "rollouts",
    ">= 0",
    "value",
)
WORK_TIME = Metric(
    "time/{work}", "wall seconds of one kind of work; the only keys that do not repeat", "s", ">= 0", "value"
)
OLD_LOGPROB_MODE = Metric("config/old_logprob_mode", "bypass or decoupled", "-", "text", "text")
LOSS_MODE = Metric("config/loss_mode", "loss that the trainer really used", "-", "text", "text")

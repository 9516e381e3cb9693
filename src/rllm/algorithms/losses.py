"""Policy losses per token, the terms added to them, and how token losses become one number.

Pure functions of tensors: nothing here knows of models, rows' text or micro-batches. Adding a loss: decorate it with `register_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rllm.algorithms.spec import LossSpec
from rllm.config.names import AGGREGATIONS, check_new_name
from rllm.config.names import LOSSES as KNOWN
from rllm.errors import ConfigError

# exp() of more than this is of no use as an importance ratio and overflows in half precision.
MAX_LOG_RATIO = 20.0
# Tinker's default weight of the quadratic term of dro.
DRO_BETA = 0.05


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of some whole rows, one entry a token, row after row; all [N] and float but `rows`.

    `logprobs` of the policy that is trained (with gradient), `old` of the one that the ratio is taken to, `rows`: which row (0, 1,
    ...) each token is of.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    rows: Tensor

    def row_mean(self, values: Tensor) -> Tensor:
        """The mean of `values` [N] over each token's row, at every token of the row [N]."""
        n_rows = int(self.rows[-1]) + 1 if len(self.rows) else 0
        sums = values.new_zeros(n_rows).index_add(0, self.rows, values)
        counts = values.new_zeros(n_rows).index_add(0, self.rows, torch.ones_like(values))
        return (sums / counts.clamp(min=1)).index_select(0, self.rows)


Statistics = dict[str, Tensor]
TokenLoss = Callable[[LossSpec, Tokens], tuple[Tensor, Statistics]]
"""(spec, tokens) -> (loss [N], statistics [N] each, without gradient). A statistic named ``ratio`` also gives its maximum and the
effective sample size; of the others the mean over the tokens is reported."""

LOSSES: dict[str, TokenLoss] = {}


def register_loss(name: str) -> Callable[[TokenLoss], TokenLoss]:
    """Decorator that makes a function the policy loss ``algorithm.loss=name``; see `TokenLoss` for what it is given and returns.
    Its settings are those of `LossSpec`; numbers of its own come from ``algorithm.loss_options``. Raises `ConfigError` for a name
    that is taken."""

    check_new_name(name, KNOWN, "loss")

    def register(fn: TokenLoss) -> TokenLoss:
        KNOWN[name] = fn.__doc__ or "registered by the user"
        LOSSES[name] = fn
        return fn

    return register


def token_loss(spec: LossSpec, tokens: Tokens) -> tuple[Tensor, Statistics]:
    """(loss [N], statistics [N] each) of the loss that `spec` names, without KL, entropy and weights."""
    if spec.name not in LOSSES:
        raise ConfigError(f"algorithm.loss: unknown loss {spec.name!r}; known are {', '.join(LOSSES)}")
    loss, statistics = LOSSES[spec.name](spec, tokens)
    if loss.shape != tokens.logprobs.shape:
        raise ConfigError(
            f"loss {spec.name!r}: gave a tensor of shape {list(loss.shape)} for {len(tokens.logprobs)} tokens; one value a token"
        )
    return loss, statistics


def log_ratio(tokens: Tokens) -> Tensor:
    """``log(pi / pi_old)`` of every token, within +-`MAX_LOG_RATIO` (beyond, no gradient flows)."""
    return (tokens.logprobs - tokens.old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(spec: LossSpec, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Statistics]:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)`` (Schulman et al. 2017, eq. 7; two bounds as in DAPO, Yu et al. 2025), and with
    `spec.clip_c` > 0, where A < 0, at most ``-c A`` (dual clip, Ye et al. 2020).

    Statistics: ``clip_fraction`` is 1 where no gradient flows because of a bound, ``clip_fraction_dual`` where that is the dual one.
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high)
    loss = torch.maximum(plain, clipped)
    stopped = clipped > plain
    statistics = {"ratio": ratio.detach()}
    if spec.clip_c > 0:
        highest = -advantages * spec.clip_c
        dual = (advantages < 0) & (loss > highest)
        loss = torch.where(dual, highest, loss)
        stopped = stopped | dual
        statistics["clip_fraction_dual"] = dual.to(loss.dtype)
    return loss, statistics | {"clip_fraction": stopped.to(loss.dtype)}


def ppo_clip(spec: LossSpec, tokens: Tokens) -> tuple[Tensor, Statistics]:
    """The clipped surrogate on each token's own ratio ``exp(logp - old)``; see `clipped_surrogate`."""
    return clipped_surrogate(spec, torch.exp(log_ratio(tokens)), tokens.advantages)


def gspo(spec: LossSpec, tokens: Tokens) -> tuple[Tensor, Statistics]:
    """The clipped surrogate on the length-normalised ratio of the whole row, ``s = exp(mean over its tokens of logp - old)``
    (Zheng et al. 2025, GSPO, eq. 5 and 7).

    Written in the paper's token form (GSPO-token): every token has the value ``s`` and the gradient of its own log-probability times
    ``s``. With one advantage a row that is, in value and gradient, the sequence form; it also takes advantages that differ.
    """
    sequence = tokens.row_mean((tokens.logprobs - tokens.old).detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.exp(sequence) * torch.exp(tokens.logprobs - tokens.logprobs.detach())
    return clipped_surrogate(spec, ratio, tokens.advantages)


def importance_sampling(spec: LossSpec, tokens: Tokens) -> tuple[Tensor, Statistics]:
    """``-r A``, nothing clipped: the policy gradient of REINFORCE, corrected for samples of another policy."""
    ratio = torch.exp(log_ratio(tokens))
    return -ratio * tokens.advantages, {"ratio": ratio.detach()}


def cispo(spec: LossSpec, tokens: Tokens) -> tuple[Tensor, Statistics]:
    """``-stop_gradient(clip(r, 1 - low, 1 + high)) A logp`` (MiniMax 2025, CISPO): clipping bounds a token's weight, and no
    token loses its gradient. ``clip_fraction`` is the share of weights at a bound."""
    ratio = torch.exp(log_ratio(tokens)).detach()
    weight = ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high)
    clipped = (weight != ratio).to(ratio.dtype)
    return -weight * tokens.advantages * tokens.logprobs, {"ratio": ratio, "clip_fraction": clipped}


def dro(spec: LossSpec, tokens: Tokens) -> tuple[Tensor, Statistics]:
    """``-(logp A - beta / 2 (logp - old)^2)`` (Richemond et al. 2024, DRO, per token); beta is
    ``algorithm.loss_options.beta``, 0.05 by default."""
    difference = tokens.logprobs - tokens.old
    penalty = 0.5 * spec.options.get("beta", DRO_BETA) * difference.square()
    return penalty - tokens.logprobs * tokens.advantages, {"ratio": torch.exp(log_ratio(tokens)).detach()}


def reinforce(spec: LossSpec, tokens: Tokens) -> tuple[Tensor, Statistics]:
    """``-logp A`` (Williams 1992): the on-policy gradient. No ratio: samples of an older policy are taken as they are."""
    return -tokens.logprobs * tokens.advantages, {}


def cross_entropy(spec: LossSpec, tokens: Tokens) -> tuple[Tensor, Statistics]:
    """Negative log-likelihood, each token weighted by its entry of `advantages` (1 for plain fine-tuning)."""
    return -tokens.logprobs * tokens.advantages, {}


LOSSES |= {fn.__name__: fn for fn in (ppo_clip, importance_sampling, cispo, gspo, dro, reinforce, cross_entropy)}


def kl_terms(logprobs: Tensor, reference: Tensor, estimator: str = "k3") -> Tensor:
    """Estimates of KL(policy || reference) [N] from the policy's own samples (Schulman 2020), with ``d = logp - ref``.

    ==  =================  ==========================================================================================
    k1  ``d``              unbiased; as a loss its gradient has mean 0, so it only adds noise: a metric, not a loss
    k2  ``d^2 / 2``        biased value; on-policy its gradient is, in the mean, that of KL(policy || reference)
    k3  ``exp(-d)-1+d``    unbiased, never negative; its gradient is, in the mean, that of KL(reference || policy)
    ==  =================  ==========================================================================================

    ``k1+`` and ``k3+`` have the value of k1 and k3 and the gradient of k2. exp() is taken of 20 at most, beyond which k3 is flat.
    """
    difference = logprobs - reference
    value = difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator in ("k3", "k3+"):
        difference = difference.clamp(min=-MAX_LOG_RATIO)
        value = torch.expm1(-difference) + difference
    elif estimator not in ("k1", "k1+"):
        raise ConfigError(f"algorithm.kl_estimator: unknown {estimator!r}; known are k1, k2, k3, k1+, k3+")
    if not estimator.endswith("+"):
        return value
    slope = 0.5 * (logprobs - reference).square()
    return value.detach() + (slope - slope.detach())


def token_weights(spec: LossSpec, row_tokens: Sequence[int], over: float | None = None) -> list[float]:
    """Weight of each trained token of each row, so that ``loss = sum over rows and tokens of weight * token loss``.

    `row_tokens` counts the trained tokens of every row of the whole optimizer step, so the result does not depend on
    micro-batches. With T tokens in R rows that have any, n in the row: ``token-mean`` 1 / T, ``token-sum`` 1,
    ``seq-mean-token-sum`` 1 / R, ``seq-mean-token-mean`` 1 / (R n), ``seq-mean-token-sum-norm`` 1 / (R norm). Rows without a
    trained token count nowhere. `over` stands in for T or R, where the whole step is not known yet.
    """
    denominator = shared_denominator(spec, row_tokens) if over is None else over
    scale = 1.0
    if spec.aggregation == "seq-mean-token-sum-norm":
        if spec.norm is None or spec.norm <= 0:
            raise ConfigError(
                f"algorithm.loss_scale_factor={spec.norm}: algorithm.loss_agg_mode={spec.aggregation} divides by it; give a number "
                "above 0, such as the most tokens of a completion"
            )
        scale = spec.norm
    own = spec.aggregation == "seq-mean-token-mean"
    return [1.0 / (denominator * (n if own else scale)) if n else 0.0 for n in row_tokens]


def shared_denominator(spec: LossSpec, row_tokens: Sequence[int]) -> float:
    """What the weights of all tokens are divided by alike, in the notation of `token_weights`: T, R, or 1 for a plain sum."""
    if spec.aggregation not in AGGREGATIONS:
        raise ConfigError(
            f"algorithm.loss_agg_mode: unknown mode {spec.aggregation!r}; known are {', '.join(AGGREGATIONS)}"
        )
    if spec.aggregation == "token-sum":
        return 1.0
    return float(sum(row_tokens) if spec.aggregation == "token-mean" else sum(n > 0 for n in row_tokens))

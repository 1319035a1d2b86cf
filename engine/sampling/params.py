"""What a request asks of the sampler: one frozen value per sequence, so rows never share state."""

from dataclasses import dataclass
from typing import Literal

from batchgen.engine.constraint.constraint import Constraint

LogprobsMode = Literal["raw", "processed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sequence is sampled and when it stops.

    The filters apply in the order temperature, top_k, top_p, min_p. Tokens that tie with the last
    token kept by a filter are kept too, so that no result depends on a sort order.

    Attributes:
        temperature: divides the logits; 0 is greedy (argmax).
        top_k: keep the k most likely tokens; 0 turns it off.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p; 1 is off.
        min_p: drop tokens less likely than min_p times the most likely one; 0 is off.
        repetition_penalty: of tokens in prompt or output (Keskar et al. 2019); 1 is off.
        presence_penalty: subtracted once from the logit of a token in the output; 0 is off.
        frequency_penalty: subtracted per occurrence in the output; 0 is off.
        max_new_tokens: generate at most this many tokens.
        min_new_tokens: before this many, EOS and stop ids cannot be sampled and stop strings
            do not stop.
        stop: strings that end the row; the text is cut before the match.
        stop_token_ids: ids that end the row, besides EOS.
        ignore_eos: EOS is an ordinary token.
        seed: 64-bit key of this sequence's random draws, which depend on it and on positions alone.
        logprobs: return the log-probability of every generated token.
        top_logprobs: also return the ids and log-probabilities of the K most likely tokens.
        columns: names of the strategy's own output columns to return (`Strategy.columns`).
        constraint: what the output must look like; it ends the row where it is complete.
        logprobs_mode: `raw` is the model's own distribution, `processed` the one sampled from.

    Raises:
        ValueError: a value is out of range; the message names it and says what is allowed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    logprobs_mode: LogprobsMode = "raw"
    columns: tuple[str, ...] = ()
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise ValueError(f"stop must be a sequence of strings, got the string {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        # `not (a <= x)` instead of `x < a`: NaN must fail too.
        checks = (
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0 and finite"),
            ("top_k", self.top_k >= 0, "at least 0 (0 turns it off)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0, finite"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("min_new_tokens", self.min_new_tokens >= 0, "at least 0"),
            ("min_new_tokens", self.min_new_tokens <= self.max_new_tokens, "<= max_new_tokens"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings"),
            ("stop_token_ids", all(t >= 0 for t in self.stop_token_ids), "ids of at least 0"),
            (
                "ignore_eos",
                not (self.ignore_eos and self.constraint),
                "false with a constraint, whose rows end with EOS",
            ),
            ("seed", -(2**63) <= self.seed < 2**64, "a 64-bit integer"),
            ("top_logprobs", 0 <= self.top_logprobs <= 100, "between 0 and 100"),
            ("logprobs_mode", self.logprobs_mode in ("raw", "processed"), "raw or processed"),
        )
        for name, ok, allowed in checks:
            if not ok:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

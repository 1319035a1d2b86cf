"""The sampling options of a request. Each request has its own frozen object, so that rows share no
state."""

from dataclasses import dataclass
from typing import Literal

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.hidden_columns import Pooling

BASE = "base"
"""The adapter name with which rows ask for the model without an adapter."""
LogprobsMode = Literal["raw", "processed"]
"""Which distribution log-probabilities describe: the model's, or the one that is sampled from."""


@dataclass(frozen=True, kw_only=True)
class SharedSampling:
    """The options that a job's configuration has, too. `RequestParams` checks their ranges."""

    temperature: float = 1.0  # divides the logits; 0 takes the most likely token (greedy)
    top_k: int = 0  # keep the k most likely tokens; 0: off
    top_p: float = 1.0  # keep the fewest most likely tokens that add up to top_p; 1: off
    min_p: float = 0.0  # drop tokens below min_p times the most likely one; 0: off
    repetition_penalty: float = 1.0  # above 1, tokens that occurred are less likely (Keskar 2019)
    presence_penalty: float = 0.0  # subtracted once from tokens of the output
    frequency_penalty: float = 0.0  # subtracted for each occurrence in the output
    max_new_tokens: int = 256  # 0: nothing is generated; an answer is scored, or the row pooled
    min_new_tokens: int = 0  # before this many tokens, neither EOS nor stops end the row
    stop: tuple[str, ...] = ()  # strings that end the row; the text is cut before them
    stop_token_ids: tuple[int, ...] = ()  # ids that end the row, besides EOS
    ignore_eos: bool = False  # EOS is an ordinary token
    seed: int = 0  # the 64-bit seed of the row's random numbers


@dataclass(frozen=True, kw_only=True)
class RequestParams(SharedSampling):
    """How one row is sampled and when it stops.

    The filters apply in the order temperature, top_k, top_p, min_p. Tokens as likely as the last
    one that a filter keeps are kept too, so no result depends on a sort order. Raises ValueError
    for a value out of range; the message names it and says what is allowed.
    """

    logprobs: bool = False  # of generated tokens; those of an answer always have them
    top_logprobs: int = 0  # K, the number of most likely tokens to return at each position
    logprobs_mode: LogprobsMode = "raw"  # raw: the model's distribution; processed: the sampled one
    columns: tuple[str, ...] = ()  # the output columns of the strategy or of layers to return
    lora: str | None = None  # the name of the row's adapter; None: the default one, or none
    constraint: Constraint | None = None  # the form of the output; ends the row when complete
    decoding: object | None = None  # the strategy's options for this row; None: its defaults
    pooling: Pooling | None = None  # how an embedding is pooled; the row generates nothing
    normalise: bool = False  # divide the embedding by its Euclidean norm

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise ValueError(f"stop must be a sequence of strings, got the string {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        # Each check states what is allowed, not what is wrong, so that NaN fails, too.
        checks = (
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0 and finite"),
            ("top_k", self.top_k >= 0, "at least 0 (0 turns it off)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0, finite"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("max_new_tokens", self.max_new_tokens >= 0, "at least 0"),
            ("min_new_tokens", self.min_new_tokens >= 0, "at least 0"),
            ("min_new_tokens", self.min_new_tokens <= self.max_new_tokens, "<= max_new_tokens"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings"),
            ("stop_token_ids", all(t >= 0 for t in self.stop_token_ids), "ids of at least 0"),
            (
                "ignore_eos",
                not (self.ignore_eos and self.constraint),
                "false with a constraint, whose rows end with EOS",
            ),
            (
                "constraint",
                not (self.constraint and not self.max_new_tokens),
                "none with max_new_tokens=0, which generates nothing that it could restrict",
            ),
            ("pooling", self.pooling in (None, "last", "mean", "cls"), "last, mean, cls or None"),
            (
                "max_new_tokens",
                self.pooling is None or self.max_new_tokens == 0,
                "0 with pooling, as the row is only read",
            ),
            ("seed", -(2**63) <= self.seed < 2**64, "a 64-bit integer"),
            ("top_logprobs", 0 <= self.top_logprobs <= 256, "between 0 and 256"),
            ("lora", self.lora != "", "the name of an adapter, or None"),
            ("logprobs_mode", self.logprobs_mode in ("raw", "processed"), "raw or processed"),
        )
        for name, ok, allowed in checks:
            if not ok:
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}")
        if self.scores_answer:
            object.__setattr__(self, "logprobs", True)

    def with_seed(self, seed: int) -> "RequestParams":
        """Return these parameters with another seed, in [0, 2**64). Nothing else is checked again,
        which keeps it fast: a job calls this for each of its rows."""
        other = object.__new__(RequestParams)
        vars(other).update(vars(self), seed=seed)
        return other

    @property
    def scores_answer(self) -> bool:
        """Whether the row scores a given answer instead of generating tokens."""
        return not self.max_new_tokens and self.pooling is None

    @property
    def greedy(self) -> bool:
        """Whether the row takes the most likely token instead of a random one."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties is on, so that the sampler needs the row's tokens."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

"""How the routers of different models compute scores and weights, as settings of one function,
`routing.route`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterForm:
    """How a router makes scores and weights, and from which groups of experts it chooses.

    With groups (DeepSeek-AI 2024, arXiv 2405.04434) experts are chosen from the `kept_groups` best.
    A group is as good as its best expert, or its best two together; of equal groups the first is
    better.
    """

    sigmoid: bool = False  # scores are sigmoids of logits, otherwise a softmax over all
    choose_first: bool = False  # scores are logits, and weights a softmax over the chosen ones
    groups: int = 1  # into which experts fall in the order of their ids
    kept_groups: int = 1
    group_best: int = 1  # how many of its experts' scores, 1 or 2, a group's adds up
    scale: float = 1.0  # multiplies the weights at last
    least_sum: float = 0.0  # is added to the sum that divides the weights

    def __post_init__(self) -> None:
        assert not (self.sigmoid and self.choose_first), "scores are one or the other"

    def check(self, num_experts: int, experts_per_token: int) -> None:
        """Raise ValueError if the groups do not fit the experts of a model."""
        if not 1 <= self.kept_groups <= self.groups or num_experts % self.groups:
            raise ValueError(
                f"topk_group {self.kept_groups} of n_group {self.groups} groups of {num_experts} "
                "experts: groups must have equal sizes, and no more can be kept than there are"
            )
        of_group = num_experts // self.groups
        if self.groups > 1 and of_group < self.group_best:
            raise ValueError(f"n_group {self.groups} leaves {of_group} expert in a group")
        if self.kept_groups * of_group < experts_per_token:
            raise ValueError(
                f"num_experts_per_tok {experts_per_token} is more than the experts of topk_group "
                f"{self.kept_groups} groups"
            )


SOFTMAX = RouterForm()
"""A softmax over all experts, without groups."""

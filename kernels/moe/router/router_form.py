"""What differs between the routers of models, as settings of one function, `routing.route`. A
router chooses the experts of a token and their weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouterForm:
    """How a router makes the scores and weights of experts, and from which groups it chooses.

    The k experts with the largest scores are chosen. By default scores are a softmax of the logits
    over all experts, and weights are the scores of the chosen ones.

    A model may divide its experts into groups (DeepSeek-AI 2024, arXiv 2405.04434): experts with
    consecutive ids. Then they are chosen from the `kept_groups` groups with the largest scores. A
    group's score is the sum of its `group_best` largest; of equal groups the first is kept.
    """

    sigmoid: bool = False  # scores are sigmoids of the logits, not a softmax
    # Scores are the logits, and weights a softmax over those of the chosen experts.
    softmax_after_top_k: bool = False
    groups: int = 1  # the number of groups; 1: no groups
    kept_groups: int = 1
    group_best: int = 1  # how many scores of a group are summed, 1 or 2
    scale: float = 1.0  # the weights are multiplied by this at the end
    least_sum: float = 0.0  # added to the sum by which weights are divided (`renormalise`)

    def __post_init__(self) -> None:
        assert not (self.sigmoid and self.softmax_after_top_k), "only one kind of score"

    def check(self, num_experts: int, experts_per_token: int) -> None:
        """Raise ValueError if the groups do not fit the experts of a model."""
        if not 1 <= self.kept_groups <= self.groups or num_experts % self.groups:
            raise ValueError(
                f"topk_group {self.kept_groups} of n_group {self.groups} groups of {num_experts} "
                "experts: groups must have equal sizes, and no more can be kept than there are"
            )
        group_size = num_experts // self.groups
        if self.groups > 1 and group_size < self.group_best:
            raise ValueError(f"n_group {self.groups} leaves {group_size} expert in a group")
        if self.kept_groups * group_size < experts_per_token:
            raise ValueError(
                f"num_experts_per_tok {experts_per_token} is more than the experts of topk_group "
                f"{self.kept_groups} groups"
            )


SOFTMAX = RouterForm()
"""A softmax over all experts, without groups."""

"""The names of the output columns that are made of hidden states: embeddings, class scores, and the
hidden states themselves. They have a file of their own, so that code can read them without loading
a model."""

from typing import Literal

Pooling = Literal["last", "mean", "cls"]
"""Which hidden states an embedding is made of: that of the last token, the mean of all tokens, or
that of the first token."""
EMBEDDING = "embedding"
"""The hidden states behind the final norm, pooled as a row's `RequestParams.pooling` says."""
CLASS_SCORES = "class_scores"
"""The logits of a classifier's classes at the row's last token."""
HIDDEN_STATES = "hidden_states"
"""The hidden states of each token behind the layers that `ModelConfig.hidden_layers` names."""
POOLED = (EMBEDDING, CLASS_SCORES)
"""Those with one value for a row, which is only read."""

"""The names of the output columns made from hidden states: embeddings, class scores, and the hidden
states themselves.

They have a separate file, so that code can read them without loading a model.
"""

from typing import Literal

Pooling = Literal["last", "mean", "cls"]
"""Which hidden states an embedding is made from: the last token's, the mean over all tokens, or the
first token's."""
EMBEDDING = "embedding"
"""The hidden states after the final norm, pooled as `RequestParams.pooling` says."""
CLASS_SCORES = "class_scores"
"""The logits of a classifier's classes at the row's last token."""
HIDDEN_STATES = "hidden_states"
"""The hidden states of each token after the layers in `ModelConfig.hidden_layers`."""
POOLED = (EMBEDDING, CLASS_SCORES)
"""The columns with one value per row; such a row generates nothing."""

"""Makes the token ids of a row's prompt from its columns."""

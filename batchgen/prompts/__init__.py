"""From a row's columns to the token ids of its prompt."""

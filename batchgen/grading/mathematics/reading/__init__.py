"""Reading answers: from text to tokens, and from tokens to what they say."""

"""The column of the output that says which images a row had."""

PROMPT_IMAGES = "prompt_images"

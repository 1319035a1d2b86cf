"""Markdown and LaTeX of texts that strangers wrote, as HTML that does nothing."""

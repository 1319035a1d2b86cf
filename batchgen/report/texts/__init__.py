"""Texts that strangers wrote, and their Markdown and LaTeX, as HTML that does nothing."""

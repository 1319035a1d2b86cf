"""Extracts the answer of a finished row, compares it with the row's target, and never hangs."""

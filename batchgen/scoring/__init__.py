"""Scores of graded samples: metrics with intervals, and the comparison of two runs."""

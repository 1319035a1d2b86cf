"""The name of this strategy's steps in reports, in a separate file so that reports can read it
without importing the strategy."""

STEP_NAME = "denoise step"

"""The name of this strategy's steps in reports, which read it without importing the strategy."""

STEP_NAME = "denoise step"

"""The name of this strategy's steps in reports. It has a file of its own, so that reports can read
it without importing the strategy."""

STEP_NAME = "denoise step"

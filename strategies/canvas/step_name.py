"""What reports call a step of this paradigm; they read it without importing the strategy."""

STEP_NAME = "denoise step"

"""What the Python interface (`LLM`, `SamplingParams`, `run_job`) takes and returns."""

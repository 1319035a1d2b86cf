"""What a job will read, write, need and cost, before it runs and while it runs."""

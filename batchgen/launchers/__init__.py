"""What starts the workers of a job."""

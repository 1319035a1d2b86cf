"""What lists show of rows: of one job or of two, their votes, those that are flipped."""

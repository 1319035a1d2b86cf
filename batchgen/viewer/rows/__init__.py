"""Finds and reads the rows of a job: by place, by id, by a filter, in an order."""

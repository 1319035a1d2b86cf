"""Reads the rows of a data set, from files or the hub, and checks what identifies them."""

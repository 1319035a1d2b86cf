"""`batchgen view`: a server for this machine alone that shows the rows of one or two jobs."""

"""Several workers on one job folder: leases, heartbeats, takeover, publishing, status."""

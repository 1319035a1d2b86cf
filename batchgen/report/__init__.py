"""What people look at when a job is done: `report.html`, and the HTML of one row."""

"""Where rows come from: files, the hub, and what identifies a row."""

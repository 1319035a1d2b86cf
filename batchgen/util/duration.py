"""Durations in words."""


def duration(seconds: float, digits: int = 1) -> str:
    """Seconds below a minute with `digits` digits after the point, then `hours:minutes:seconds`."""
    if seconds < 60:
        return f"{seconds:.{digits}f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"

"""The attacks of check_strangers.py: a module for each kind of thing that strangers make."""

"""The constraint of each row, and the check of finished texts against their constraints."""

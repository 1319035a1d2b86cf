"""Whether two mathematical answers are the same: reading them, their values, their normal forms."""

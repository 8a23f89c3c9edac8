"""What no model calls yet. It may be removed, and the rest of the package does not need it."""

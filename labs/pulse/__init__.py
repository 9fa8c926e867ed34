"""Lab: only the bits that changed travel."""

"""Lab: a pipeline without a bubble."""

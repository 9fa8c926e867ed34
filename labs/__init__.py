"""The labs: one folder each, one code path from a toy run to a cluster."""

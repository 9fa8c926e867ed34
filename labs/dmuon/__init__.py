"""Lab: Muon whose matrices each have one owner."""

"""Lab: Muon against AdamW."""

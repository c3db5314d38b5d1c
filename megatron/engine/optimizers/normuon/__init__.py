"""NorMuon."""

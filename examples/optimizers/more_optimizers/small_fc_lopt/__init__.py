"""The learned optimizer small_fc_lopt."""

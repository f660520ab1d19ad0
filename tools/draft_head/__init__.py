"""Draft heads of the EAGLE-3 form, trained on what their model itself writes."""

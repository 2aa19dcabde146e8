"""Programs on top of the package: what one runs beside training, not in it."""

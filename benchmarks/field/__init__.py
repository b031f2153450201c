"""Plans of models as people train them, beside the formulas of the programs that people train them with."""

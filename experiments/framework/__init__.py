"""The framework of the experiments: base class, tables, figures and the report."""

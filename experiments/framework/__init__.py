"""What every experiment is made with: its shape, its tables, figures and the report."""

"""What several test files share, one module per subject."""

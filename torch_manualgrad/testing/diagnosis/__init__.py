"""After a failure: the element that is wrong, the likely cause, and a smaller sample that fails."""

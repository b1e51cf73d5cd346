"""The machinery: custom ops, formulas, rules and how they act. Knows no formula."""

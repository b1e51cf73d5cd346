"""The machinery: custom ops, formulas, rules, overrides. Its rooms import from each other in one direction: override, rule, op,
engine, and the files that lie here."""

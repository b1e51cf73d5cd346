"""Custom ops, formulas, rules, overrides. Imports go in one direction: override, rule, op, engine, the files here."""

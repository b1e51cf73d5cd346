"""The work of the command line; its commands and options are in `torch_manualgrad_cli`, which imports these on use."""
